"""What can go wrong with supervised services, each with what was found.

ServiceError
`-- SupervisorError
    |-- AlreadyRunning   another supervisor runs on this directory
    |-- ServiceDied      a service ended that should not have
    |-- CrashLoop        a service died too often in a row
    |-- NotReady         a service runs but did not become ready in time
    |-- NotBack          a service that died was not ready again in time
    `-- NotStopped       a process did not end, not even when killed
"""

from __future__ import annotations

from infra.errors import ServiceError


class SupervisorError(ServiceError):
    """The local services could not be run as asked."""


class AlreadyRunning(SupervisorError):
    """Another supervisor runs on this directory."""


class ServiceDied(SupervisorError):
    """A service ended before it was ready, or one that is not restarted failed."""


class CrashLoop(SupervisorError):
    """A service died too often in a row."""


class NotReady(SupervisorError):
    """A service runs but did not become ready in time."""


class NotBack(SupervisorError):
    """A service that died was not ready again in time."""


class NotStopped(SupervisorError):
    """A process did not end, not even when killed."""
