"""Creates the tables and records which version of them a database holds.

Applying is idempotent, and brings a database of any earlier version up to date. The version only rises: a program
refuses a database that a newer one has written, and a database without a record is new. The statements are in
`schema.sql`.
"""

from __future__ import annotations

import logging
from pathlib import Path

from clickhouse_connect.driver.asyncclient import AsyncClient

from infra.clickhouse.client import FAILURES, Address, connect, explained
from infra.errors import ConfigError

log = logging.getLogger(__name__)

VERSION = 4
"""Version of `schema.sql`; raise it with every change, so that no older program puts its own views in place."""

_FILE = Path(__file__).with_name("schema.sql")


def statements(text: str | None = None) -> list[str]:
    """Return the statements of `schema.sql`; each ends with a semicolon at the end of a line."""
    lines = (text if text is not None else _FILE.read_text()).splitlines()
    code = "\n".join(line for line in lines if line.strip() and not line.startswith("--"))
    return [part.strip() for part in f"{code}\n".split(";\n") if part.strip()]


async def apply(address: Address) -> None:
    """Bring the database at *address* to this program's version.

    Raises:
        ConfigError: the database was written by a newer program.
        infra.clickhouse.client.StoreError: ClickHouse is away or refuses.
    """
    # The database may not exist yet, so the first connection names none.
    client = await connect(address, database="")
    try:
        await _command(client, f"CREATE DATABASE IF NOT EXISTS `{address.database}`")
    finally:
        await client.close()
    client = await connect(address)
    try:
        found = await version(client)
        if found > VERSION:
            raise ConfigError(
                f"ClickHouse at {address} holds schema version {found}; this program knows {VERSION}."
                " Update the program, or name another database"
            )
        for statement in statements():
            await _command(client, statement)
        if found < VERSION:
            await _command(client, f"INSERT INTO schema_version (version) VALUES ({VERSION})")  # noqa: S608 - our own number
            log.info("ClickHouse at %s: schema version %d -> %d", address, found, VERSION)
    finally:
        await client.close()


async def version(client: AsyncClient) -> int:
    """Return the version that a database holds; 0 if it is new."""
    try:
        exists = await client.command("EXISTS TABLE schema_version")
        return int(str(await client.command("SELECT max(version) FROM schema_version"))) if exists else 0
    except FAILURES as error:
        raise explained(error, "reading the schema's version") from error


async def _command(client: AsyncClient, statement: str) -> None:
    try:
        await client.command(statement)
    except FAILURES as error:
        raise explained(error, f"applying the schema: {statement.partition('(')[0]}") from error
