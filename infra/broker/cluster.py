"""Several Kafka nodes on this machine as one cluster: what survives the loss of one broker can be tried here.

Each node is broker and controller, has a data directory of its own below the cluster's, and keeps its ports for the
life of the object: a node that was killed comes back where the others look for it. Topics get three copies, of which
two must have a record (with fewer nodes, as many as there are). A laptop needs none of this: `rollmill up` runs one.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from infra import loopback
from infra.broker import archive, jars
from infra.broker.errors import PortTaken
from infra.broker.local import BrokerStatus, LocalBroker, Node, new_cluster_id

CLUSTER_HEAP_MB = 256
"""Most heap of one node: three of them take as much memory as a laptop has to spare."""

MOST_COPIES = 3
"""Copies of each topic where there are enough nodes."""

START_LIMIT_S = 120.0
"""Longest wait until a node answers: the first one waits for a majority, and all share the processors."""


class LocalCluster:
    """A cluster of nodes numbered from 1, that ends with this process."""

    def __init__(self, data_dir: Path, *, nodes: int = 3) -> None:
        """Choose ports; nothing is started yet.

        Args:
            data_dir: holds a folder for each node.
            nodes: how many.

        Raises:
            PortTaken: there are not enough free ports.
        """
        self._ports = _free_ports(2 * nodes)
        self._copies = min(nodes, MOST_COPIES)
        voters = ",".join(f"{node}@${{host}}:{self._controller_port(node)}" for node in range(1, nodes + 1))
        cluster = new_cluster_id()
        self._nodes = {
            node: LocalBroker(
                data_dir / str(node),
                port=self._ports[2 * node - 2],
                insist=True,
                start_limit_s=START_LIMIT_S,
                node=Node(settings=self._settings(node, voters), cluster=cluster, heap_mb=CLUSTER_HEAP_MB),
            )
            for node in range(1, nodes + 1)
        }
        # A child ends with the thread that started it: these live as long as the cluster.
        self._threads = ThreadPoolExecutor(nodes, thread_name_prefix="kafka-node")

    def _controller_port(self, node: int) -> int:
        return self._ports[2 * node - 1]

    def _settings(self, node: int, voters: str) -> dict[str, str]:
        controller = f"CONTROLLER://${{host}}:{self._controller_port(node)}"
        copies, enough = str(self._copies), str(max(1, self._copies - 1))
        return {
            "node.id": str(node),
            "controller.quorum.voters": voters,
            "listeners": f"BROKER://${{host}}:${{port}},{controller}",
            "default.replication.factor": copies,
            "min.insync.replicas": enough,
            "offsets.topic.replication.factor": copies,
            "transaction.state.log.replication.factor": copies,
            "transaction.state.log.min.isr": enough,
            # A broker asks the active controller, for ids of producers among others; a frozen one would hold it up for
            # half a minute, although another has been elected long since.
            "controller.socket.timeout.ms": "3000",
        }

    @property
    def bootstrap(self) -> str:
        """Addresses of all nodes."""
        return ",".join(f"{loopback.HOST}:{port}" for port in self._ports[::2])

    def start(self) -> None:
        """Start all nodes at once, since none answers before a majority is there.

        Raises:
            LocalBrokerError: one did not start; then none is left running.
        """
        found = jars.resolve()
        flags = _class_archive(found)
        starting = [self._threads.submit(self._launch, node, found, flags) for node in self._nodes]
        try:
            for started in starting:
                started.result()
        except BaseException:
            self.stop()
            raise

    def start_node(self, node: int) -> BrokerStatus:
        """Start one node that has ended, on its data and its ports. Raises LocalBrokerError."""
        found = jars.resolve()
        return self._threads.submit(self._launch, node, found, _class_archive(found)).result()

    def _launch(self, node: int, found: jars.Jars, flags: list[str]) -> BrokerStatus:
        return self._nodes[node].launch(found, java_flags=flags, detached=False)

    def node(self, node: int) -> BrokerStatus:
        """Return what is known about one node."""
        return self._nodes[node].status()

    def stop(self) -> None:
        """Stop all nodes that run."""
        # At once, too: a node on its own waits for a majority to take over its partitions.
        list(self._threads.map(LocalBroker.stop, self._nodes.values()))
        self._threads.shutdown()


def _class_archive(found: jars.Jars) -> list[str]:
    classes = archive.ensure(found)
    return [f"-XX:SharedArchiveFile={classes}"] if classes else []


def _free_ports(count: int) -> list[int]:
    ports: list[int] = []
    for _ in range(count):
        port = loopback.find_free(ports)
        if port is None:
            raise PortTaken(loopback.NONE_FREE)
        ports.append(port)
    return ports
