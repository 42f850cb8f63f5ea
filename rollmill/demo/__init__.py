"""The demo: a tiny transformer learns a hunt for a key and a door, through the whole system.

`recipe.py` holds every number; `warmstart.py` makes the model; `evaluation.py` measures it; `machine.py` starts the
services, as processes on Kafka or all in this process; `flow.py` is the story from start to replay; `screen.py` and
`chart.py` show it. Nothing about it is special: the same services and the same code as any run.
"""
