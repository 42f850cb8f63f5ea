"""EVAL: Rollout -> Trajectory. Grades from the rollout alone; the environment is not needed any more."""
