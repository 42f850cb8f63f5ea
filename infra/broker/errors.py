"""What can go wrong with a local broker, each with what to do about it.

ServiceError
`-- LocalBrokerError
    |-- JavaNotFound       no Java that runs Kafka
    |-- MavenNotFound      no Maven to fetch the jars with
    |-- JarsNotResolved    Maven failed
    |-- LockTimeout        another process holds the cache or the data directory for too long
    |-- AlreadyRunning     a broker runs on this data directory
    |-- PortTaken          the port that the caller insists on belongs to somebody else
    |-- NotStarted         the broker ended or did not answer in time
    |   |-- DiskFull       there is no room for its data
    |   `-- WrongData      the data is not Kafka's, of another node or cluster, or of another version
    `-- NotStopped         the broker did not end, not even when killed

The last line of each message is what to do.
"""

from __future__ import annotations

from typing import ClassVar

from infra.errors import ServiceError


class LocalBrokerError(ServiceError):
    """A local broker could not do what was asked.

    Attributes:
        advice: what to do about it; the last line of the message.
    """

    advice: ClassVar[str] = ""

    def __init__(self, found: str) -> None:
        super().__init__(f"{found}\n{self.advice}" if self.advice else found)


class JavaNotFound(LocalBrokerError):
    """There is no Java that runs Kafka."""

    advice = (
        "install Java 17 or later (Debian and Ubuntu: apt-get install openjdk-17-jre-headless), "
        "or use a Kafka that runs elsewhere by giving its bootstrap address"
    )


class MavenNotFound(LocalBrokerError):
    """There is no Maven to fetch the jars with."""

    advice = (
        "install Maven (Debian and Ubuntu: apt-get install maven; with Java: openjdk-17-jre-headless), "
        "or use a Kafka that runs elsewhere by giving its bootstrap address"
    )


class JarsNotResolved(LocalBrokerError):
    """Maven could not fetch the jars."""

    advice = "check the network and Maven's settings (~/.m2/settings.xml), then try again; nothing is half done"


class LockTimeout(LocalBrokerError):
    """Another process holds the cache or the data directory for too long."""

    advice = "if no other command is at work there, end the process that holds the file open"


class AlreadyRunning(LocalBrokerError):
    """A broker runs on this data directory."""

    advice = "use it at that address, or stop it first: rollmill broker stop"


class PortTaken(LocalBrokerError):
    """The port that the caller insists on belongs to somebody else."""

    advice = "give another port, or do not insist and let a free one be chosen"


class NotStarted(LocalBrokerError):
    """The broker ended or did not answer in time."""


class DiskFull(NotStarted):
    """There is no room for the broker's data."""

    advice = (
        "make room on that disk (or raise the quota, or `ulimit -f`) and start it again, "
        "or give another directory with --data"
    )


class WrongData(NotStarted):
    """The data is not Kafka's, of another node or cluster, or of another version."""

    advice = (
        "nothing was changed there. Start it with the Kafka and the settings that wrote it, move it away, "
        "or give another directory with --data"
    )


class NotStopped(LocalBrokerError):
    """The broker did not end, not even when killed."""

    advice = "the system holds the process (often a hanging disk); look at it with ps"
