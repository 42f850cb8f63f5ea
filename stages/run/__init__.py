"""RUN: Episode -> Rollout. Claims the environment and drives the turns between it and the policy.

`episode.py` decides without I/O, `render.py` makes tokens, `stage.py` carries both out. An agent that drives itself
calls `proxy.py`; what its calls are in the record is decided in `branches.py`.
"""
