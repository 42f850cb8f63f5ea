"""Task families: the file of a family shows how it starts, what its actions are and how it is graded.

`base.py` is the protocol, `registry.py` finds families through the entry point group `rollmill.handlers`. `keydoor.py`
and `reasoning.py` are the families of our own; what lies beside them under their names (`keydoor_policies.py`,
`reasoning_answers.py`, `reasoning_puzzles.py`) belongs to them. `rules.py` plays a family by a
script. A handler owns no process, socket or clock; its environment lives in the environment host.
"""
