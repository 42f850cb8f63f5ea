"""ClickHouse's HTTP interface over the chDB engine, for a machine without a ClickHouse server.

One process per data path, loopback only. What clickhouse-connect, curl and Grafana's plugin need is here: queries by
GET, POST and form, parameters, settings in the URL, sessions, inserts in any input format, ClickHouse's own error
codes, headers and status. `statement.py` splits a statement from its data, `request.py` reads an HTTP request,
`engine.py` is the only file that knows chDB, `sessions.py` keeps connections between requests, `server.py` joins
them.

Not supported, and answered with code 48 (NOT_IMPLEMENTED): native block compression (`compress=1`, `decompress=1`),
external data, roles, `INSERT ... SELECT ... FROM input(...)` with inline data, `FROM INFILE`, `INTO OUTFILE`.
Responses are never compressed. There is one user, `default`.

The engine has no users or grants of its own: whoever may query may also read the machine's files through table
functions. That is why the service refuses to listen beyond loopback.
"""
