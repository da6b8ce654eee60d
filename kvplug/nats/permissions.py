"""What each key needs to be allowed on the NATS servers, and no more.

In:  the subjects of a fleet; who it is for.   Out: subjects to publish and to subscribe to.

    publisher   an engine, or a forwarder for several: its own events and beats, answers to asks
    router      reads all, keeps snapshots, purges; it cannot publish events
    operator    makes and changes streams

examples/nats_permissions.py writes them as nats-server reads them. Inboxes begin with the name of a
connection (kvplug/nats/connection.py), so no engine or router can listen to another's answers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from kvplug.nats.subjects import Subjects, token_of

PUBLISHER_NAME: Final = "engine"
"""What connections of publishers are called, forwarders among them."""

MAX_RESPONSES: Final = 1_000_000
"""Messages of an answer, for nats-server's allow_responses."""

RESPONSE_LIMIT_S: Final = 300


class Permissions(NamedTuple):
    """answers: may also publish to the inbox of each message that it receives."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    answers: bool = False


def router_name(router_id: str) -> str:
    """What the connection of a router replica is called, and its consumer."""
    return f"router-{router_id}"


def of_publisher(subjects: Subjects, workers: Iterable[str]) -> Permissions:
    """Of an engine, or of a forwarder of all these; all their data-parallel ranks."""
    tokens = [token_of(worker) for worker in workers]
    own = [(f"kvplug.{subjects.fleet}", token) for token in tokens]
    return Permissions(
        publish=tuple(
            f"{fleet}.{kind}.{token}.*" for fleet, token in own for kind in ("kv", "beat")
        ),
        subscribe=(
            f"_INBOX.{PUBLISHER_NAME}.>",
            # Beats: to hear of another publisher of the same name.
            *(f"{fleet}.{kind}.{token}.*" for fleet, token in own for kind in ("ask", "beat")),
        ),
        answers=True,
    )


def of_router(subjects: Subjects, router_id: str) -> Permissions:
    """Of one router replica; streams must be there already."""
    stream, name = subjects.stream, router_name(router_id)
    fleet = f"kvplug.{subjects.fleet}"
    return Permissions(
        publish=(
            f"{fleet}.ask.>",
            subjects.sync(router_id),
            subjects.replica(router_id),
            subjects.marks,
            "$JS.API.INFO",
            *_kept(stream),
            f"$JS.API.CONSUMER.LIST.{stream}",
            f"$JS.API.CONSUMER.NAMES.{stream}",
            *(
                f"$JS.API.CONSUMER.{what}.{stream}.{name}"
                for what in ("CREATE", "DURABLE.CREATE", "DELETE", "INFO", "MSG.NEXT")
            ),
            f"$JS.API.CONSUMER.CREATE.{stream}.{name}.>",
            f"$JS.ACK.{stream}.{name}.>",
            f"$KV.{subjects.state_bucket}.>",
            *_kept(f"KV_{subjects.state_bucket}"),
            f"$O.{subjects.snapshot_bucket}.>",
            *_kept(f"OBJ_{subjects.snapshot_bucket}"),
        ),
        subscribe=(
            f"_INBOX.{name}.>",
            subjects.all_events,
            subjects.all_beats,
            subjects.all_sync,
            subjects.all_replicas,
        ),
    )


def of_operator() -> Permissions:
    """Of who makes and changes streams, with whatever tool."""
    return Permissions(publish=("$JS.API.>",), subscribe=("_INBOX.>",))


def _kept(stream: str) -> tuple[str, ...]:
    """Reading it, and purging what is old."""
    return (
        *(f"$JS.API.STREAM.{what}.{stream}" for what in ("INFO", "MSG.GET", "PURGE")),
        f"$JS.API.DIRECT.GET.{stream}",
        f"$JS.API.DIRECT.GET.{stream}.>",
    )
