"""What /health says: the state of each worker and of its event stream.

In:  the fleet.   Out: a JSON object.
"""

from __future__ import annotations

from typing import Any

from kvplug.ingest.follower import Follower
from kvplug.server.fleet import Fleet, Worker


def health_of(fleet: Fleet) -> dict[str, Any]:
    """`status` is "ok" while at least one worker is up."""
    workers = list(fleet.workers.values())
    return {
        "status": "ok" if any(worker.is_up for worker in workers) else "no_worker",
        "workers": [_worker(worker, fleet) for worker in workers],
    }


def _worker(worker: Worker, fleet: Fleet) -> dict[str, Any]:
    return {
        "url": worker.url,
        "state": "up" if worker.is_up else "down",
        "reason": worker.down_because,
        "models": sorted(worker.models),
        "events": _events(worker, fleet.events_endpoint),
    }


def _events(worker: Worker, shared_endpoint: str | None) -> dict[str, Any] | None:
    """None if the worker publishes none."""
    follower = worker.follower
    if follower is None:
        return None
    return {
        "endpoint": worker.spec.events or shared_endpoint,
        "connected": follower.connected,
        "trust": follower.trust.level,
        "reason": follower.trust.reason,
        "cure": follower.trust.cure,
        "last_sequence": follower.repair.last,
        "messages": follower.num_messages,
        "messages_missed": follower.repair.num_missed,
        "restarts": follower.repair.num_restarts,
        "replays": _replays(follower) if follower.can_replay else None,
        "blocks_stored": follower.num_stored,
        "blocks_removed": follower.num_removed,
        "skipped": dict(follower.skipped),
    }


def _replays(follower: Follower) -> dict[str, Any]:
    repair = follower.repair
    return {
        "asked": repair.num_replays,
        "failed": repair.num_failures,
        "messages_recovered": repair.num_recovered,
        "last_repair_s": repair.last_repair_s,
    }
