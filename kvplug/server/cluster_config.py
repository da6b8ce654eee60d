"""ClusterConfig: which NATS servers a router shares its index with others over, and how.

In:  values from the command line.   Out: a frozen object, or a ConfigError in one sentence.
"""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvplug.errors import ConfigError
from kvplug.nats.flags import NatsFlags, servers_of
from kvplug.setting import Limits, check_settings, setting, settings_of, whole

EMBEDDED: Final = "embedded"
_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)
_PORT: Final = 4222
_ANY: Final = "nats://127.0.0.1:4222"
_OF_SERVER: Final = ("nats_store", "nats_port")
_SECURE: Final = (
    "nats_creds_file", "nats_nkey_file", "nats_tls_ca_file", "nats_tls_cert_file",
    "nats_tls_key_file",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig(NatsFlags):
    """Without `nats`, a router stands alone, and nothing else may be set."""

    nats: str | None = setting(
        None,
        "NATS servers of one cluster, `nats://host:port` or `tls://host:port` with commas between "
        "them, or `embedded`: this router starts one. Events of engines come over them, snapshots "
        "of the index are kept there, and routers share them ([cluster](cluster.md))",
        flag="--nats URL[,URL...]",
    )
    nats_store: Path | None = setting(
        None,
        "folder of the embedded server: its stream of events and the snapshots",
        flag="--nats-store FOLDER",
        default_text="`kvplug/nats` under `$XDG_STATE_HOME`",
    )
    nats_port: int = setting(
        _PORT,
        "port of the embedded server, on loopback; 0 takes a free one, and the log says which",
        flag="--nats-port",
        limits=Limits("in [0, 65535]", lambda value: 0 <= whole(value) < 2**16),
    )
    nats_replicas: int = setting(
        1,
        "servers that keep a copy of the stream and of the snapshots, 1, 3 or 5, if this router "
        "creates them. With 3, one server may fail",
        flag="--nats-replicas",
        limits=Limits("1, 3 or 5", lambda value: whole(value) in (1, 3, 5)),
    )
    nats_max_bytes: int = setting(
        2**30,
        "maximum size of the stream, if this router creates it; the oldest events go first. Set "
        "it well below the servers' disks",
        flag="--nats-max-bytes",
        limits=Limits("at least 1048576", lambda value: whole(value) >= 2**20),
    )
    router_id: str | None = setting(
        None,
        "name of this router, unique among the routers of the fleet and the same after each start: "
        "1 to 64 letters, digits, _ or -",
        flag="--router-id",
        default_text="host name and port",
        limits=Limits(
            "1 to 64 letters, digits, _ or -",
            lambda value: value is None or bool(_ID.fullmatch(str(value))),
        ),
    )
    router_snapshot_threshold: int = setting(
        10_000,
        "with more messages than this in the stream since the last snapshot, one of the routers "
        "makes another snapshot and removes them from the stream",
        flag="--router-snapshot-threshold",
        limits=Limits("above 0", lambda value: whole(value) > 0),
    )
    router_reset_states: bool = setting(
        False,
        "discard the stream and the snapshots, and ask the engines what they hold. Routers that "
        "run do the same",
        flag="--router-reset-states",
    )
    router_replica_sync: bool = setting(
        False,
        "tell the other routers what this one sends to which worker, and count what they send "
        "([replica sync](cluster.md#replica-sync))",
        flag="--router-replica-sync",
    )

    def __post_init__(self) -> None:
        check_settings(self)
        given = [
            each.name
            for each, _ in settings_of(ClusterConfig)
            if each.name != "nats" and getattr(self, each.name) != each.default
        ]
        if self.nats is None and given:
            raise ConfigError(f"{given[0]}: expected nats with it, the URL of a NATS server")
        wrong = [name for name in given if name in (_SECURE if self.is_embedded else _OF_SERVER)]
        if self.nats is not None and wrong:
            remedy = "leave it out, as that server takes connections from this machine only"
            if not self.is_embedded:
                remedy = "leave it out, as a server elsewhere has settings of its own"
            raise ConfigError(f"{wrong[0]}: not with nats={self.nats!r}; {remedy}")
        if self.nats is not None:
            self.settings_at(self.servers if not self.is_embedded else (_ANY,))  # checks itself

    def require_use(self, *, follows_events: bool) -> None:
        """ConfigError if a router that follows events, or one that does not, has no use for it."""
        if self.nats is None or follows_events:
            return
        if self.router_reset_states:
            raise ConfigError("router_reset_states: expected a router that follows events")
        if not self.router_replica_sync:
            raise ConfigError(
                "nats: expected a router that follows events, or router_replica_sync, got neither"
            )

    @property
    def is_embedded(self) -> bool:
        """Whether this router starts the server."""
        return self.nats == EMBEDDED

    @property
    def servers(self) -> tuple[str, ...]:
        """Their URLs; none of an embedded one, whose port may be free."""
        if self.nats is None or self.is_embedded:
            return ()
        return servers_of(self.nats)

    @property
    def store(self) -> Path:
        """The embedded server's folder."""
        state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
        return self.nats_store or Path(state) / "kvplug" / "nats"

    def id_at(self, port: int) -> str:
        """The router's name among others; `port`: where it listens, 0 if that is not fixed."""
        if self.router_id is not None:
            return self.router_id
        host = re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname())[:50]
        return f"{host}-{port or os.getpid()}"
