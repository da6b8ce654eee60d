"""What /health says: the state of each worker, of its ranks' event streams, and what is wrong.

In:  fleet, router, audit, diagnosis.   Out: a JSON object.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from math import isnan
from typing import TYPE_CHECKING, Any

import msgspec

from kvplug.audit.audit import Audit
from kvplug.audit.ledger import RankLedger
from kvplug.events import Rank
from kvplug.ingest.follower import Follower
from kvplug.ingest.trust import TrustState
from kvplug.protocol import MAJOR
from kvplug.router.cache_sizes import CacheSize
from kvplug.router.core import Router
from kvplug.server.diagnosis.board import Diagnosis
from kvplug.server.workers.fleet import Fleet
from kvplug.server.workers.worker import Worker

if TYPE_CHECKING:
    from kvplug.server.clustering import Cluster


def _never() -> bool:
    return False


class Health:
    """body() is what /health says now."""

    def __init__(
        self,
        fleet: Fleet,
        router: Router,
        audit: Audit,
        diagnosis: Diagnosis,
        is_draining: Callable[[], bool] = _never,
    ) -> None:
        self._fleet, self._router, self._is_draining = fleet, router, is_draining
        self._audit, self._diagnosis = audit, diagnosis
        self.cluster: Cluster | None = None
        """With other routers; shown if it is set."""

    def body(self) -> dict[str, Any]:
        """`status` is "draining" while the router stops, else "ok" while a worker is up and events
        are received, whatever the findings.
        """
        workers, ledgers = list(self._fleet.workers.values()), self._audit.ledgers()
        body = {
            "status": self._status(workers),
            "workers": [self._worker(each, ledgers) for each in workers],
            "findings": msgspec.to_builtins(self._diagnosis.look()),
        }
        return body if self.cluster is None else body | {"cluster": self.cluster.shown()}

    def _status(self, workers: list[Worker]) -> str:
        if self._is_draining():
            return "draining"
        if not self._fleet.hears_events:
            return "event_thread_ended"
        return "ok" if any(worker.is_up for worker in workers) else "no_worker"

    def _worker(self, worker: Worker, ledgers: Mapping[Rank, RankLedger]) -> dict[str, Any]:
        return {
            "name": worker.name,
            "url": worker.url,
            "state": worker.state,
            "reason": worker.down_because,
            "ejected_for_s": self._fleet.ejections.left_s(worker.name),
            "models": sorted(worker.models),
            "block_size": self._fleet.block_size_of(worker),
            "ranks": [self._rank(rank, ledgers.get(rank)) for rank in worker.ranks],
        }

    def _rank(self, rank: Rank, ledger: RankLedger | None) -> dict[str, Any]:
        return {
            "dp_rank": rank.dp_rank,
            "cache": _cache(self._router.cache_size(rank)),
            "model": _model(self._router, rank),
            "events": self._events(rank),
            "audit": None if ledger is None else _audit(ledger),
        }

    def _events(self, rank: Rank) -> dict[str, Any] | None:
        """None if the rank publishes none, though they would be used."""
        if not self._fleet.uses_events:
            return {"endpoint": None, "connected": False} | _trust(self._fleet.trust_without_events)
        follower = self._fleet.follower_of(rank)
        endpoint = self._fleet.events_endpoint_of(rank)
        return None if follower is None else _of_stream(follower, endpoint)


def _cache(size: CacheSize) -> dict[str, Any]:
    """In blocks; what is wrong with a capacity is among the findings."""
    return {
        "resident": size.num_resident,
        "capacity": size.capacity or None,
        "capacity_source": size.source,
    }


def _model(router: Router, rank: Rank) -> dict[str, Any]:
    """How fast the engine is taken to be, and how far off that was of late."""
    quality = router.model_quality(rank)
    errors = {"first_token": quality.first_token_error, "answer": quality.answer_error}
    return {
        **asdict(router.engine_model(rank)),
        "observed_first_tokens": quality.num_first_tokens,
        "observed_answers": quality.num_answers + quality.num_wholes,
        "errors": {name: None if isnan(error) else error for name, error in errors.items()},
    }


def _audit(ledger: RankLedger) -> dict[str, Any]:
    return {
        "audited": ledger.num_audited,
        "incorrectly_routed": ledger.num_wrong,
        "incorrect_rate": ledger.incorrect_rate,
        "accuracy": ledger.accuracy,
        "verdicts": {verdict.value: count for verdict, count in ledger.num_by_verdict.items()},
        "not_audited": dict(ledger.num_skipped),
    }


def _trust(trust: TrustState) -> dict[str, Any]:
    return {"trust": trust.level, "reason": trust.reason, "fix": trust.fix}


def _of_stream(follower: Follower, endpoint: str | None) -> dict[str, Any]:
    return {
        "endpoint": endpoint,
        "connected": follower.connected,
        "wire": _wire(follower),
        "hello": msgspec.to_builtins(follower.about),
        **_trust(follower.trust),
        "last_sequence": follower.sequencer.last,
        "messages": follower.num_messages,
        "messages_missed": follower.sequencer.num_missed,
        "restarts": follower.sequencer.num_restarts,
        "replays": _replays(follower)
        if follower.can_replay or follower.about is not None
        else None,
        "blocks_stored": follower.num_stored,
        "blocks_removed": follower.num_removed,
        "skipped": dict(follower.skipped),
    }


def _wire(follower: Follower) -> str | None:
    """Whose messages come, of kvplug's without a version if they cannot be read; None while none
    has come.
    """
    if follower.speaks_ours:
        return "kvplug" if follower.about is None else f"kvplug {MAJOR}"
    return "stock" if follower.num_messages else None


def _replays(follower: Follower) -> dict[str, Any]:
    sequencer = follower.sequencer
    return {
        "asked": sequencer.num_replays,
        "failed": sequencer.num_failures,
        "messages_recovered": sequencer.num_recovered,
        "last_repair_s": sequencer.last_repair_s,
    }
