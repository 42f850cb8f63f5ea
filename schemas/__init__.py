"""Pure data: what travels between the stages and what it means.

`topics.py` is the flow, one line per topic; `messages.py` what the stage topics carry; `transcript.py` the tokens
and their invariants; `outcome.py` how a rollout ends; `decisions.py` what the trainer writes down; `control.py`
current state; `arbiter.py` and `dispositions.py` which record counts and where each sample went; `codec.py` the
bytes. Imports the standard library, msgpack, msgspec and numpy, nothing of ours, and does no I/O.
"""
