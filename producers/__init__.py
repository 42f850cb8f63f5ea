"""Where tasks come from, and who makes sure that each one ends.

`source.py` is what a task source is, `jsonl.py` and `generated.py` are two, `sources.py` makes one from RUN.toml;
`publish.py` expands groups into tasks; `feeder.py` publishes as far ahead of the trainer as its credit allows;
`collect.py` waits for the outcomes of a run without a trainer; `reaper.py` ends samples whose time ran out, as
`open_samples.py` decides, and tidies up (`upkeep.py`); `redrive.py` does again what was given up.
Anything that can write msgpack to Kafka is a producer too: `docs/wire.md`.
"""
