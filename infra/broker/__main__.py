"""`python -m infra.broker`: fetch Kafka's jars and make its class archive now, so that no first start has to."""

from __future__ import annotations

import logging
import sys

from infra.broker import LocalBrokerError, prepare


def main() -> int:
    """Prepare the cache; 1 with a plain message when that cannot be done."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        found = prepare()
    except LocalBrokerError as error:
        logging.getLogger(__name__).error("%s", error)  # noqa: TRY400 - a user's error needs no traceback
        return 1
    logging.getLogger(__name__).info("Kafka is ready in %s (Java %s)", found.folder.parent, found.java.version)
    return 0


if __name__ == "__main__":
    sys.exit(main())
