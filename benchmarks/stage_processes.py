"""The simulated stages as processes of this machine, started and ended as `rollmill up` does it.

Each worker has the product's defaults. One that dies ends the measurement, unless that is what is measured: a figure
over fewer workers than it says would be worse than none.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from infra.config import BusConfig
from rollmill.services import JOIN_LIMIT_S, OWNS_PARTITIONS
from rollmill.supervisor import Restart, Service, Supervisor
from rollmill.supervisor.readiness import says

ONE_EACH: Mapping[str, int] = {"init": 1, "run": 1, "eval": 1}
"""All stages, one process of each."""


@asynccontextmanager
async def simulated_stages(
    config: BusConfig, workers: Mapping[str, int] = ONE_EACH, *, restart: Restart = Restart.NEVER
) -> AsyncIterator[Supervisor]:
    """Run the stages until the block is left; it begins when every worker owns its share of the partitions.

    Args:
        config: the log.
        workers: stage -> how many processes of it.
        restart: what to do with one that dies.

    Raises:
        rollmill.supervisor.SupervisorError: a stage did not start, or died in the meantime.
    """
    settings = ("--set", f"bus.bootstrap={config.bootstrap}", "--set", f'bus.prefix="{config.prefix}"')
    services = [
        Service(
            name=name,
            argv=(sys.executable, "-m", "benchmarks.simulated", name, *settings),
            ready=says(OWNS_PARTITIONS, limit_s=JOIN_LIMIT_S),
            restart=restart,
            instances=instances,
        )
        for name, instances in workers.items()
    ]
    with tempfile.TemporaryDirectory(prefix="rollmill-benchmark-") as folder:
        async with Supervisor(services, run_dir=Path(folder)) as supervisor, asyncio.TaskGroup() as group:
            await supervisor.start()
            watching = group.create_task(supervisor.wait())
            yield supervisor
            watching.cancel()
