"""Where tasks come from, and who makes sure that each one ends.

`source.py` is what a task source is, `jsonl.py` and `generated.py` are two; `publish.py` expands groups into tasks;
`feeder.py` publishes as far ahead of the trainer as its credit allows; `reaper.py` ends samples whose time ran out.
Anything that can write msgpack to Kafka is a producer too: `docs/wire.md`.
"""
