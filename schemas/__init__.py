"""Pure data: what travels between the stages and what it means.

`topics.py` is the flow, one line per topic. What travels: `message.py` the base of all, `messages.py` what the stage
topics carry, `transcript.py` the tokens and their invariants, `outcome.py` how a rollout ends, `decisions.py` what the
trainer writes down, `control.py` current state, `telemetry.py` events and metrics. What it means: `identity.py` names
and seeds, `partition.py` where a key belongs, `arbiter.py` and `dispositions.py` which record counts and where each
sample went, `batch.py` when two steps are the same. `codec.py` makes the bytes; `diagram.py` and `wire_page.py` the
generated parts of the documentation. Imports the standard library, msgpack, msgspec and numpy, nothing of ours, and
does no I/O.
"""
