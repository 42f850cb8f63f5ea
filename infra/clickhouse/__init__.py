"""ClickHouse: what the log says, as tables, exactly once.

`schema.sql` and `schema.py` are the tables, `streams.py` says which topics fill them, `rows.py` turns a message into
their rows, `ranges.py` decides which offsets go into one insert, `conflicts.py` tells of records that took another
task's id, `sink.py` is the one service that writes, `check.py` proves where every sample of a run went. `client.py`
reaches a ClickHouse server; `local_server/` stands in for one on one machine. Everything else reads by HTTP.
"""
