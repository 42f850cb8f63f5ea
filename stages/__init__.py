"""The path of a rollout: Task -INIT-> Episode -RUN-> Rollout -EVAL-> Trajectory.

Each stage is one handler function (`init/stage.py`, `run/stage.py`, `eval/stage.py`) that `infra/worker.py` runs in
its own consumer group; `pipeline.py` runs all three in one process. `handlers/` holds the task families, one file
each. No stage knows another, and none imports torch.
"""
