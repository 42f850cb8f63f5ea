"""The services of `rollmill up` as processes of this machine, for as long as they are measured.

One that dies ends the measurement: a figure with a restart in it would be worse than none.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import replace

from rollmill import services
from rollmill.services import Argv, LocalPlan, local_services
from rollmill.supervisor import Restart, Supervisor

SIMULATED = ("init", "run", "eval")
"""Commands of `benchmarks.simulated`."""


@asynccontextmanager
async def plan_services(
    plan: LocalPlan, *, without: Collection[str], argv: Argv = services.rollmill
) -> AsyncIterator[Supervisor]:
    """Run the services of a plan until the block is left; it begins when all are ready.

    Args:
        plan: where everything is.
        without: services that are left out.
        argv: turns a command and its options into a program with arguments.
    """
    plan.write()
    chosen = [
        replace(one, restart=Restart.NEVER) if one.restart is Restart.ALWAYS else one
        for one in services.without(local_services(plan, argv=argv), set(without))
    ]
    async with Supervisor(chosen, run_dir=plan.run_dir) as supervisor, asyncio.TaskGroup() as group:
        await supervisor.start()
        watching = group.create_task(supervisor.wait())
        yield supervisor
        watching.cancel()


def simulated(command: str, *options: str) -> tuple[str, ...]:
    """Return the call of a command (`Argv`), with the work of the stages simulated."""
    program = ("-m", "benchmarks.simulated") if command in SIMULATED else ("-m", "rollmill")
    return (sys.executable, *program, command, *options)
