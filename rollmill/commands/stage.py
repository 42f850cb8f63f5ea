"""`rollmill init | run | eval`: one worker of a stage, the same as `python -m stages.<stage>`."""

from __future__ import annotations

from stages.eval.__main__ import command as eval_command
from stages.init.__main__ import command as init_command
from stages.run.__main__ import command as run_command

__all__ = ["eval_command", "init_command", "run_command"]
