"""Environments live here and nowhere else: a service, one per node, behind create / reset / claim / step / verdict.

`environment.py` is what an environment is; `lease.py` decides who may touch it and when it is gone, without I/O;
`host.py` holds environments under leases; `protocol.py` is what is said to it, `server.py` and `client.py` put it on a
socket (`address.py`), `local.py` is the twin in one process, `heartbeat.py` keeps a claim alive, `scripted.py` is the
environment for tests. Nothing here knows a task family: the host is handed a function that builds environments.
"""
