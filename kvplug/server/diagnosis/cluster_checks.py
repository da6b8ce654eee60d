"""One function per cause: what is wrong between this router and the others.

In:  the status of its replica.   Out: findings. Pure, as checks.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from kvplug.cluster.parts import Part
from kvplug.server.diagnosis.finding import CLUSTER, Code, Finding

if TYPE_CHECKING:
    from kvplug.cluster.replica_status import ReplicaStatus  # needs the extra

Found = Iterator[Finding]

_MAX_LAG_S = 10.0
_MAX_NAMED = 5
_OF_STREAM = (Part.STREAM, Part.CONSUMER)


def check_replica(status: ReplicaStatus) -> list[Finding]:
    """The findings, by code."""
    found = [finding for check in _CHECKS for finding in check(status)]
    return sorted(found, key=lambda finding: finding.code)


def _away(status: ReplicaStatus) -> Found:
    if not status.is_connected:
        seen = status.problems.get(Part.CONNECTION, "no connection")
        fix = "start the servers, or compare --nats with where they listen; the router goes on "
        fix += "with what it knows, and engines that publish there are STALE"
        yield Finding(CLUSTER, Code.NATS_AWAY, "a connection to a NATS server", seen, fix)


def _refused(status: ReplicaStatus) -> Found:
    if status.refused:
        seen = f"refused: {', '.join(status.refused[:_MAX_NAMED])}"
        fix = "give the router's key the permissions of docs/security.md (NATS)"
        yield Finding(CLUSTER, Code.NATS_REFUSED, "permission for all that it does", seen, fix)


def _stream(status: ReplicaStatus) -> Found:
    problems = [status.problems[part] for part in _OF_STREAM if part in status.problems]
    if status.is_connected and problems:
        fix = "give the router the permissions of docs/security.md, or make the stream and the "
        fix += "buckets with a key that may; look at the servers' log and disks"
        yield Finding(CLUSTER, Code.NATS_STREAM, "the stream of events", problems[0], fix)


def _snapshot(status: ReplicaStatus) -> Found:
    if status.is_connected and Part.SNAPSHOT in status.problems:
        fix = "look at the servers' disks and at the router's permissions; until it succeeds, the "
        fix += "stream is kept as long as its limits let it"
        seen = status.problems[Part.SNAPSHOT]
        yield Finding(CLUSTER, Code.SNAPSHOT_FAILED, "a snapshot", seen, fix)


def _restore(status: ReplicaStatus) -> Found:
    if Part.RESTORE in status.problems:
        fix = "nothing: the engines were asked, and the next snapshot replaces it; if it comes "
        fix += "back, look at the servers' disks"
        seen = status.problems[Part.RESTORE]
        yield Finding(CLUSTER, Code.SNAPSHOT_UNUSABLE, "a snapshot to begin with", seen, fix)


def _behind(status: ReplicaStatus) -> Found:
    if status.is_connected and status.lag_s > _MAX_LAG_S:
        seen = f"{status.lag_messages} messages that are not applied, for {status.lag_s:.0f} s"
        fix = "give the router a core of its own, or let engines publish to it directly "
        fix += "(docs/cluster.md)"
        yield Finding(CLUSTER, Code.BEHIND, "the end of the stream", seen, fix)


def _double(status: ReplicaStatus) -> Found:
    if status.is_double:
        seen = f"another one that is called {status.router_id}"
        fix = "give each a --router-id of its own: they take each other's events"
        yield Finding(CLUSTER, Code.ROUTER_ID, "one router of this id", seen, fix)


_CHECKS: tuple[Callable[[ReplicaStatus], Found], ...] = (
    _away, _refused, _stream, _snapshot, _restore, _behind, _double,
)  # fmt: skip
