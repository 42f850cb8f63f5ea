"""`rollmill cancel RUN | RUN/GROUP | RUN/GROUP/SAMPLE`: withdraws samples, queued or running.

Writes one record to `control`; stages, environment hosts, reaper and feeder act on it. Saying it twice changes nothing.
"""

from __future__ import annotations

from typing import Any

import click

from infra.arguments import TEXT, Number
from infra.bus import Bus
from infra.clock import Clock, SystemClock
from infra.config import Config
from infra.connect import connected
from infra.control import ControlView, control_now
from infra.errors import CAUSE_CHARS, ConfigError
from infra.wire import Publisher
from rollmill import output
from rollmill.covered import Covered
from schemas.control import Cancel, Credit, RunManifest
from schemas.topics import CONTROL

TARGET_CHARS = 1_000
"""Longest target."""

LONGEST_WAIT_S = 30 * 86_400.0
"""Longest wait that may be asked for, seconds."""


@click.command("cancel")
@click.argument("target", type=TEXT)
@click.option("--cause", type=TEXT, default="by request", show_default=True, help="Why; goes into each outcome.")
@click.option(
    "--force", is_flag=True, help="Do not look first: cancel also what the log does not know (yet), or what is over."
)
@click.option("--wait", is_flag=True, help="Return when every sample has an outcome.")
@click.option(
    "--limit",
    "limit_s",
    default=60.0,
    show_default=True,
    type=Number(0, LONGEST_WAIT_S),
    help="Longest wait, seconds.",
)
@output.json_option
@output.config_options
def command(target: str, cause: str, *, force: bool, wait: bool, limit_s: float, as_json: bool, config: Config) -> None:
    """Cancel TARGET: a run, RUN/GROUP or RUN/GROUP/SAMPLE.

    Queued samples end as `cancelled` at once, running episodes are stopped and their environments closed; what is
    published under TARGET later ends the same way. What has an outcome keeps it: where all is over there is nothing to
    cancel, and the command says so.
    """

    async def work() -> dict[str, Any]:
        async with connected(config.bus, client="cancel") as bus:
            return await withdraw(bus, SystemClock(), target, cause, force=force, wait_s=limit_s if wait else None)

    output.print_result(output.run(work()), as_json, _show)


async def withdraw(
    bus: Bus, clock: Clock, target: str, cause: str, *, force: bool, wait_s: float | None
) -> dict[str, Any]:
    """Cancel a target and return what became of it.

    Args:
        bus: the log, connected.
        clock: for limits.
        target: a run, `run/group` or `run/group/sample`.
        cause: why, for the outcomes.
        force: do not ask whether the target is known, and not over.
        wait_s: wait at most this long for every sample to have an outcome; None does not wait.

    Raises:
        ConfigError: the log knows no such run, group or sample, or all of it is over.
        infra.errors.WaitTimeout: some samples have no outcome after wait_s.
    """
    if not target.isprintable() or not 0 < len(target) <= TARGET_CHARS:
        raise ConfigError(f"{target[:80]!r} is no target: name a run, RUN/GROUP or RUN/GROUP/SAMPLE")
    view = await control_now(bus, clock)
    covered = Covered(bus, clock, target)
    before = _standing(view, target)
    if not force:
        if view.get(f"run/{target}", RunManifest) is None:
            await _require_a_task(covered, view, target)
        if before is None:
            await covered.read()
            _refuse_what_is_over(covered, view, target)
    cancel = before or Cancel(target=target, cause=_writable(cause))
    if before is None:
        await Publisher(bus, clock, "cancel").publish(CONTROL, cancel)
    await covered.read()
    if wait_s is not None:
        await covered.all_ended(wait_s)
    return {
        "target": target,
        "cause": cancel.cause,
        "cancelled_before": None if before is None else before.target,
        "samples": len(covered.admitted),
        "open": len(covered.open),
        "outcomes": covered.outcomes,
    }


async def _require_a_task(covered: Covered, view: ControlView, target: str) -> None:
    """Raise ConfigError unless the log holds a task of the target."""
    if await covered.first_task() is None:
        raise ConfigError(_unknown(view, target))


def _refuse_what_is_over(covered: Covered, view: ControlView, target: str) -> None:
    """Raise ConfigError if a cancel would find nothing: it would only mark as cancelled what ended well."""
    manifest, credit = view.get(f"run/{target}", RunManifest), view.get(f"credit/{target}", Credit)
    # A run that a trainer paces gets more tasks until its trainer has closed it.
    goes_on = manifest is not None and manifest.paced and not (credit is not None and credit.closed)
    if covered.all_over and not goes_on:
        ended = ", ".join(f"{count} {kind}" for kind, count in covered.outcomes.items()) or "its tasks are forgotten"
        raise ConfigError(
            f"nothing to cancel: every sample of {target!r} has its outcome ({ended}) and keeps it. --force writes the "
            "cancel all the same, for what is published under that name later"
        )


def _standing(view: ControlView, target: str) -> Cancel | None:
    """Return a cancel that covers the target already."""
    parts = target.split("/")
    wider = ("/".join(parts[:end]) for end in range(1, len(parts) + 1))
    return next((found for name in wider if (found := view.get(f"cancel/{name}", Cancel)) is not None), None)


def _unknown(view: ControlView, target: str) -> str:
    run, _, rest = target.partition("/")
    if rest and view.get(f"run/{run}", RunManifest) is not None:
        found = f"run {run!r} is known, but no task of it is {target!r}"
    else:
        found = f"`control` holds no manifest of {run!r} and `tasks` no task of {target!r}"
    return (
        f"nothing to cancel: {found}. `rollmill runs` lists the runs, `rollmill show RUN` names groups and samples; "
        "--force cancels whatever is published under that name later"
    )


def _writable(cause: str) -> str:
    """Return a text that can be written, whatever the terminal gave."""
    return cause.encode("utf-8", "backslashreplace").decode()[:CAUSE_CHARS]


def _show(result: dict[str, Any]) -> None:
    before, target = result["cancelled_before"], result["target"]
    said = f"cancelled [bold]{target}[/]" if before is None else f"[bold]{target}[/] is cancelled already, as {before}"
    ended = ", ".join(f"{count} {kind}" for kind, count in result["outcomes"].items()) or "none has an outcome yet"
    output.console.print(f"{said} ({result['cause']}): {result['samples']} samples, {ended}", highlight=False)
    if result["open"]:
        output.console.print(
            f"{result['open']} are open: queued ones end as cancelled, running ones are stopped and their environments "
            "closed; --wait waits for that"
        )
    output.console.print("what is published under it later ends the same way")
