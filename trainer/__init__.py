"""The trainer: learns from exactly what the log says, once, in an order that is itself data.

Pure parts first: `groups.py` (which groups make a step), `advantages.py`, `loss.py`, `batching.py`, `credit.py`,
`history.py`. Around them: `learner.py` (the model), `checkpoint.py`, `weights.py`, `decision_log.py` and `loop.py`,
which puts them together. `replay.py` makes the decisions again from the log, `sft.py` is the warm start, `models.py`
makes small models from nothing. Knows `infra` and `schemas`, no stage and no producer.
"""
