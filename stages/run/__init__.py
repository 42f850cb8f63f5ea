"""RUN: Episode -> Rollout. Claims the environment and drives the turns between it and the policy.

`episode.py` decides without I/O, `render.py` makes tokens, `stage.py` carries both out.
"""
