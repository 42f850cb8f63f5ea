"""A disk that takes no more: what was written where, how much is free, what to do."""

from __future__ import annotations

import errno
import re
import sys
from pathlib import Path
from types import ModuleType

import click
import pytest

from infra.disk import NoSpace, described, room_for
from infra.service import run_service
from rollmill import cli

FULL = Path("/dev/full")
"""A device that takes no byte: the system's own refusal, without filling anything."""

pytestmark = pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")


def fill():
    with FULL.open("wb", buffering=0) as stream:
        stream.write(b"x")


def test_what_was_to_be_written_where_is_told_with_how_much_is_free_and_what_to_do(tmp_path):
    """The system names no file when a write fails."""
    target = tmp_path / "not" / "there" / "yet"
    with pytest.raises(NoSpace) as caught, room_for("the checkpoint of step 4", target, then="It goes on then."):
        fill()

    said = str(caught.value)
    assert said.startswith(f"writing the checkpoint of step 4 to {target}: No space left on device, ")
    assert re.search(r"\d+ MB are free; make room there .*\. It goes on then\.$", said)


@pytest.mark.parametrize("number", [errno.EDQUOT, errno.EFBIG])
def test_a_quota_and_a_limit_on_files_are_a_full_disk_too(tmp_path, number):
    """They are mended in the same way."""
    with pytest.raises(NoSpace), room_for("a file", tmp_path, then=""):
        raise OSError(number, "no")


def test_another_error_of_a_disk_is_left_as_it_is(tmp_path):
    """Making room would not mend it."""
    with pytest.raises(PermissionError), room_for("a file", tmp_path, then=""):
        raise PermissionError(errno.EACCES, "no")


def test_an_error_that_names_no_file_is_told_with_the_places_that_are_written_to(tmp_path):
    """Whoever reads it knows where to look."""
    said = described(OSError(errno.ENOSPC, "No space left on device"), [tmp_path])

    assert f"MB are free in {tmp_path}" in said
    assert "make room there" in said
    assert "no: /x" == described(OSError(errno.EACCES, "no", "/x"), [tmp_path])


@pytest.mark.parametrize("as_json", [False, True])
def test_a_command_that_meets_a_full_disk_says_more_than_the_system(monkeypatch, capsys, as_json):
    """Whatever it was writing."""
    module = ModuleType("rollmill.commands.fill")
    module.command = click.Command("fill", callback=fill)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(cli.COMMANDS, "fill", ("fill", "Fill a disk."))
    module.command.params.append(click.Option(["--json"], is_flag=True, expose_value=False))
    with pytest.raises(SystemExit, match="1"):
        cli.main(["fill", *(["--json"] if as_json else [])])

    said = capsys.readouterr()
    assert "error: No space left on device (" in said.err
    assert "MB are free in" in said.err
    assert ("MB are free in" in said.out) is as_json


def test_a_service_that_meets_a_full_disk_says_so_in_a_line(capsys):
    """And ends with 1: whoever supervises it starts it again, until there is room."""

    async def main():
        fill()

    assert 1 == run_service(main)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: No space left on device (")
