"""ClickHouse: what the log says, as tables, exactly once.

`schema.sql` and `schema.py` are the tables, `rows.py` turns a message into their rows, `sink.py` is the one service
that writes, `check.py` proves where every sample of a run went. `local_server/` stands in for a ClickHouse server on
one machine. Everything else reads by HTTP.
"""
