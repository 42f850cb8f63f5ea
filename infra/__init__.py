"""Every seam to the outside: the log, engines, environment hosts, ClickHouse, time.

Each seam is a narrow protocol (`bus.py`, `inference/base.py`, `envhost/environment.py`, `clock.py`) with an in-memory
twin that passes the same contract tests. On the log: `wire.py` turns messages into records, `worker.py` is the one loop
that stages run on, `middleware/` wraps a handler with one concern per file, `reading.py` reads what is there already,
`control.py` keeps current state. Knows `schemas`, knows no stage, no trainer and no producer.
"""
