"""Environments live here and nowhere else: a service, one per node, behind create / reset / claim / step / verdict.

`environment.py` is what an environment is; `lease.py` decides who may touch it and when it is gone, without I/O;
`server.py` and `client.py` put both on a socket. Nothing here knows a task family: the host is handed a function that
builds environments.
"""
