import asyncio
import os
import re
from contextlib import contextmanager

from rollmill.supervisor.logfile import TAIL_LINES, LogFile


def test_a_log_takes_at_most_twice_its_limit(tmp_path):
    """A chatty service does not fill the disk; the last output is always there."""
    log = LogFile(tmp_path / "x.log", max_bytes=100)
    for number in range(200):
        log.write(b"line %d\n" % number)
    log.close()

    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 200
    assert (tmp_path / "x.log").read_text().endswith("line 199\n")


def test_a_new_supervisor_begins_a_new_file_and_keeps_the_one_before(tmp_path):
    """What happened yesterday can still be read."""
    for text in (b"first\n", b"second\n", b"third\n"):
        log = LogFile(tmp_path / "x.log")
        log.write(text)
        log.close()

    assert (tmp_path / "x.log").read_text() == "third\n"
    assert (tmp_path / "x.log.1").read_text() == "second\n"


def test_the_tail_holds_the_last_lines_of_this_life_only(tmp_path):
    """Also an unfinished one: a crash rarely ends its line."""
    log = LogFile(tmp_path / "x.log")
    log.write(b"of the life before\n")
    log.begin("life 2")
    log.write(b"a\nb")
    assert log.tail() == ("a", "b")
    log.write(b"".join(b"\nline %d" % number for number in range(50)))
    assert len(log.tail()) == TAIL_LINES
    assert log.tail()[-1] == "line 49"
    log.close()
    assert "=== life 2 ===" in (tmp_path / "x.log").read_text()


async def test_a_line_can_be_waited_for_even_when_it_comes_in_pieces(tmp_path):
    """Pipes cut where they like; a line that has come already is found too."""
    log = LogFile(tmp_path / "x.log")
    waiting = asyncio.create_task(log.said(re.compile("listening on (.+)")))
    await asyncio.sleep(0)
    log.write(b"noise\nlisten")
    log.write(b"ing on 127.0.0.1:80\nmore")

    assert await waiting == "listening on 127.0.0.1:80"
    assert await log.said(re.compile("^noise")) == "noise"
    log.close()


def test_output_that_never_ends_a_line_is_bounded_and_bytes_that_are_no_text_are_shown(tmp_path):
    """A progress bar or binary rubbish costs no memory."""
    log = LogFile(tmp_path / "x.log")
    for _ in range(50):
        log.write(b"\xff" * 10_000)

    assert max(len(line) for line in log.tail()) <= 64 * 1024 + 10_000
    log.close()


def test_a_full_disk_stops_no_output_and_the_file_says_what_is_missing(tmp_path):
    """The pipe of a service is read on, its last lines are known, and once there is room the file goes on."""
    log = LogFile(tmp_path / "x.log")
    log.write(b"before\n")
    with full(log):
        log.write(b"lost\n")
        log.begin("life 2")
        log.write(b"also lost\n")
        assert ("also lost",) == log.tail()
    missing = log.missing
    log.write(b"after\n")
    log.close()

    assert missing == len("lost\n=== life 2 ===\nalso lost\n")
    assert (
        tmp_path / "x.log"
    ).read_text() == f"before\n=== {missing} bytes are missing here: the disk was full ===\nafter\n"


@contextmanager
def full(log):
    """A disk that takes no byte of a log: the system's own refusal."""
    descriptor = log._file.fileno()
    kept, device = os.dup(descriptor), os.open("/dev/full", os.O_WRONLY)
    os.dup2(device, descriptor)
    try:
        yield
    finally:
        os.dup2(kept, descriptor)
        os.close(kept)
        os.close(device)
