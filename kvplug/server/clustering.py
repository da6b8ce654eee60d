"""What a router in a cluster needs besides itself: a NATS server if it starts one, replica, sync.

In:  a ServerConfig with `nats`, a router.   Out: a Replica for the fleet; how it is.

Needs the extra `kvplug[nats]`; only a router with --nats imports it.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self

import msgspec

from kvplug.cluster.replica import Replica, ReplicaSettings
from kvplug.cluster.streams import StreamSettings
from kvplug.cluster.sync import ReplicaSync
from kvplug.nats.server import EmbeddedServer
from kvplug.router.core import Router
from kvplug.server.cluster_config import ClusterConfig
from kvplug.server.config import ServerConfig

logger = logging.getLogger(__name__)


class Cluster:
    """An async context manager, entered before the fleet starts; replica, sync; begin_sync."""

    def __init__(self, config: ServerConfig, router: Router) -> None:
        self._config, self._router = config, router
        self.sync: ReplicaSync | None = None
        """None until it has begun, and without --router-replica-sync."""
        self.embedded: EmbeddedServer | None = None
        """None without --nats embedded."""

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as started:
            servers = self._servers(started)
            self.replica = Replica(self._router, self._settings(servers))
            started.push_async_callback(self.replica.stop)
            if not self._config.router.follows_events:
                self.replica.start(None)
                self.replica.follow(list)
            self._started = started.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._started.aclose()

    async def begin_sync(self) -> None:
        """Share the load, if that is wanted; once the fleet has started."""
        if not self._cluster.router_replica_sync:
            return
        replica = self.replica
        self.sync = ReplicaSync(
            self._router, replica.connection, replica.subjects, replica.router_id
        )
        self._started.push_async_callback(asyncio.to_thread, self.sync.stop)
        self.sync.start()

    def shown(self) -> dict[str, Any]:
        """For /health."""
        status: dict[str, Any] = msgspec.to_builtins(self.replica.status)
        sync = None if self.sync is None else msgspec.to_builtins(self.sync.status())
        restarts = None if self.embedded is None else self.embedded.num_restarts
        return status | {"sync": sync, "embedded_restarts": restarts}

    @property
    def _cluster(self) -> ClusterConfig:
        return self._config.cluster

    def _servers(self, started: AsyncExitStack) -> tuple[str, ...]:
        if not self._cluster.is_embedded:
            return self._cluster.servers
        server = self.embedded = EmbeddedServer(self._cluster.store, port=self._cluster.nats_port)
        server.start()  # not in another thread: Linux ends it with the thread that started it
        started.push_async_callback(asyncio.to_thread, server.stop)
        keeping = asyncio.create_task(server.keep())
        started.callback(keeping.cancel)
        return (server.url,)

    def _settings(self, servers: tuple[str, ...]) -> ReplicaSettings:
        cluster = self._cluster
        return ReplicaSettings(
            nats=cluster.settings_at(servers),
            router_id=cluster.id_at(self._config.port),
            stream=StreamSettings(
                num_replicas=cluster.nats_replicas, max_bytes=cluster.nats_max_bytes
            ),
            snapshot_threshold=cluster.router_snapshot_threshold,
            resets_states=cluster.router_reset_states,
            follows_events=self._config.router.follows_events,
        )
