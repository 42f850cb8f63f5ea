"""Task families: one file shows how a family starts, what its actions are and how it is graded.

`base.py` is the protocol, `registry.py` finds families through the entry point group `rollmill.handlers`. A handler
owns no process, socket or clock; its environment lives in the environment host.
"""
