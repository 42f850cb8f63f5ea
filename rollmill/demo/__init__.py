"""The demo: a tiny transformer learns a hunt for a key and a door, through the whole system.

`recipe.py` holds every number; `warmstart.py` makes the model; `evaluation.py` measures it, `baselines.py` the players
without one. `machine.py` is what the story needs of the services; `processes.py` runs them on Kafka, `in_process.py` in
memory. `flow.py` is the story from start to replay; `screen.py` and `chart.py` show it, `queries.py` proposes what to
ask then. Nothing about it is special: the same services and the same code as any run.
"""
