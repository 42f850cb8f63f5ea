import os
import time

import pytest

from benchmarks.hop import FULL, MESSAGE_BYTES, QUICK, SETTINGS, cpu_seconds, payloads, per_second
from benchmarks.hop_sides import command, forwarded
from benchmarks.simulated import FAMILY
from benchmarks.work import make_tasks
from schemas import codec
from schemas.messages import Episode


def test_the_rate_is_over_the_time_between_the_first_and_the_last_record():
    """Eleven records in a second are ten steps of a tenth, in whatever order they were read."""
    assert per_second([1_000 + 100 * step for step in range(10, -1, -1)]) == pytest.approx(10.0)


def test_a_window_without_length_is_no_figure():
    """It would be any number at all."""
    with pytest.raises(ValueError, match="give the side more work"):
        per_second([5, 5, 5])


def test_every_task_has_the_promised_size_and_is_another_one():
    """To a few bytes: the number of the row is in it."""
    tasks = make_tasks("hop", payloads(300), family=FAMILY)

    assert all(abs(len(codec.encode(task)) - MESSAGE_BYTES) <= 8 for task in tasks)
    assert len({task.group for task in tasks}) == 300


def test_a_rival_makes_the_same_of_a_task_as_the_simulated_stage():
    """Decoded and encoded by the product's codec, so that both sides carry the same bytes."""
    (task,) = make_tasks("hop", payloads(1), family=FAMILY)

    episode = codec.decode(forwarded(codec.encode(task)), Episode)

    assert (episode.task, len(episode.messages)) == (task, 1)


@pytest.mark.parametrize("plan", [QUICK, FULL])
def test_every_side_is_a_command_and_has_work(plan):
    """A side without one would be started in vain."""
    assert SETTINGS.keys() == plan.messages.keys() == command.commands.keys()


def test_the_time_on_a_core_grows_with_work_and_not_with_waiting():
    """As the kernel counts it, in its own steps."""
    before, until = cpu_seconds(os.getpid()), time.process_time() + 0.2
    while time.process_time() < until:
        pass

    assert 0.1 <= cpu_seconds(os.getpid()) - before
