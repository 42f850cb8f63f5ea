"""The trainer: learns from exactly what the log says, once, in an order that is itself data.

Pure parts first: `terminal.py` (one record), `groups.py` (which groups make a step), `advantages.py`, `gae.py`,
`loss.py`, `importance.py`, `batching.py`, `step_batch.py`, `credit.py`, `curriculum.py`, `history.py`, `state.py`,
`progress.py`, `guards.py`, `repetition.py`.
Around them: `forward.py`, `policy.py`, `adapters.py`, `value.py` and `learner.py` (the model), `ranks.py`,
`torch_ranks.py` and `crew.py` (several processes that train together), `weights.py` and `checkpoint.py` (the disk),
`run_lock.py`, `decision_log.py` and `announce.py` (the log), and `loop.py`, which puts them together as `config.py`
says. `replay.py` makes the decisions again from the log, `diff.py` compares two runs, `sft.py` is the warm start,
`models.py` makes small models from nothing. `plan.py` says what a run will need before it begins, `presets/` are
values to begin from. Knows `infra` and `schemas`, no stage and no producer.
"""
