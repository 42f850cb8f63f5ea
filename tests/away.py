"""An environment host that may be away and come back with its leases, as behind a network that breaks."""

from __future__ import annotations

from infra.envhost.client import HostAway
from infra.envhost.local import LocalEnvHost


class AwayHost(LocalEnvHost):
    """The host in this process; while `away` it answers nobody."""

    away = False
    refused = 0
    """Calls of stages that reached nobody; probes are not counted."""
    named: str | None = None
    """Its address, where it is not the usual one."""

    @property
    def address(self):
        """Where the host is."""
        return self.named or super().address

    def _reach(self):
        if self.away:
            self.refused += 1
            raise HostAway("connection refused")

    async def create(self, request):
        """Build and reset an environment."""
        self._reach()
        return await super().create(request)

    async def renew(self, lease, token=None):
        """Postpone the end of a lease."""
        self._reach()
        await super().renew(lease, token)

    async def ready(self, lease):
        """Say that the Episode is in the log."""
        return not self.away and await super().ready(lease)

    async def claim(self, lease):
        """Take the environment over."""
        self._reach()
        return await super().claim(lease)

    async def step(self, lease, token, action):
        """Carry out one action."""
        self._reach()
        return await super().step(lease, token, action)

    async def verdict(self, lease, token):
        """Return the environment's final state."""
        self._reach()
        return await super().verdict(lease, token)

    async def close(self, lease, token):
        """Say that an output of this claim is in the log."""
        return not self.away and await super().close(lease, token)

    async def counts(self):
        """Say how the host is."""
        if self.away:
            raise HostAway("connection refused")
        return await super().counts()
