"""Where ClickHouse is, from the configuration: `infra/clickhouse` does not know it."""

from __future__ import annotations

from infra.clickhouse.client import Address
from infra.config import Config


def address(config: Config) -> Address:
    """Return the address of the configured ClickHouse."""
    store = config.clickhouse
    return Address.parse(
        store.url, database=store.database, user=store.user, password=store.password.get_secret_value()
    )
