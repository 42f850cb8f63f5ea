"""The path of a rollout: Task -INIT-> Episode -RUN-> Rollout -EVAL-> Trajectory.

Each stage is one handler function (`init/stage.py`, `run/stage.py`, `eval/stage.py`) that `infra/worker.py` runs in
its own consumer group. `wiring.py` says between which topics; `process.py` makes one stage a process, `pipeline.py`
runs all three in one. `handlers/` holds the task families. No stage knows another, and none imports torch.
"""
