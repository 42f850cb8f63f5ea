import asyncio
import re
import socket

import pytest
from aiohttp import web

from rollmill.supervisor.logfile import LogFile
from rollmill.supervisor.readiness import answers_http, answers_kafka, listens


@pytest.fixture
def log(tmp_path):
    file = LogFile(tmp_path / "x.log")
    yield file
    file.close()


@pytest.fixture
def port():
    with socket.socket() as link:
        link.bind(("127.0.0.1", 0))
        return link.getsockname()[1]


async def within(seconds, check, log):
    """Tell whether a check returns in time."""
    try:
        async with asyncio.timeout(seconds):
            await check(log)
    except TimeoutError:
        return False
    return True


@pytest.mark.parametrize("kind", ["tcp", "unix"])
async def test_a_service_that_listens_is_ready_once_it_takes_connections(kind, log, port, tmp_path):
    """Both kinds of address that a service here may have."""
    path = tmp_path / "s"
    ready = listens(f"unix:{path}" if kind == "unix" else f"http://127.0.0.1:{port}")
    assert not await within(0.2, ready.check, log)

    def close(_, writer):
        writer.close()

    start = asyncio.start_unix_server(close, path) if kind == "unix" else asyncio.start_server(close, "127.0.0.1", port)
    async with await start:
        assert await within(5, ready.check, log)


async def test_a_server_that_answers_with_an_error_is_not_ready_until_it_answers_200(log, port):
    """An engine that is loading listens already and says 503."""
    asked = []

    async def health(_):
        asked.append(1)
        return web.Response(status=503 if len(asked) < 3 else 200)

    app = web.Application()
    app.router.add_get("/health", health)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()

    ready = answers_http(f"http://127.0.0.1:{port}/health")
    assert "" == ready.why()
    assert await within(5, ready.check, log)
    assert len(asked) == 3
    assert "the last try: it answers 503" == ready.why()
    await runner.cleanup()


async def test_a_port_that_does_not_speak_kafka_is_no_broker(log, port):
    """The port may be somebody else's."""

    def talk(_, writer):
        writer.write(b"HTTP/1.1 400 no\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(talk, "127.0.0.1", port):
        assert not await within(0.3, answers_kafka(f"127.0.0.1:{port}").check, log)


def test_every_readiness_says_what_it_waits_for():
    """The error of a wait that failed is made from it."""
    waits = [listens("unix:/x"), answers_http("http://h/x"), answers_kafka("h:1")]
    assert all(re.search(r"/x|h:1", ready.what) for ready in waits)
