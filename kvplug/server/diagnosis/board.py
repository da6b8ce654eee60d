"""Diagnosis: keeps looking at the fleet and knows what is wrong with it now.

In:  fleet, prompts, an audit and its router.   Out: findings; a line in the log when one begins or
ends.

Engines are asked what they say of themselves when they come up, and every minute from then on.
The router is told how many blocks they have room for.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from kvplug.audit.audit import Audit
from kvplug.audit.ledger import RankLedger
from kvplug.errors import UnknownRankError
from kvplug.events import Rank
from kvplug.ingest.follower import Follower
from kvplug.ingest.trust import STOCK_OVER_NATS, UNCONFIRMED, Trust
from kvplug.server.api.prompts import Prompts
from kvplug.server.config import ServerConfig
from kvplug.server.diagnosis.checks import check_all
from kvplug.server.diagnosis.cluster_checks import check_replica
from kvplug.server.diagnosis.facts import EngineFacts
from kvplug.server.diagnosis.finding import CLUSTER, Code, Finding
from kvplug.server.diagnosis.probe import Prober, compare_tokenization
from kvplug.server.diagnosis.view import Disagreement, RecentCounts, StreamView, WorkerView
from kvplug.server.workers.asking import WorkerSession
from kvplug.server.workers.fleet import Fleet
from kvplug.server.workers.worker import Worker

if TYPE_CHECKING:
    from kvplug.cluster.replica import Replica

logger = logging.getLogger(__name__)

_ASK_AGAIN_S = 60.0
# What was skipped once, long ago, is no longer wrong.
_RECENT_S = 300.0
_KNOWN_MOST_LIKELY = (UNCONFIRMED, STOCK_OVER_NATS)


class _Asked(NamedTuple):
    at_s: float
    num_times_up: int
    facts: EngineFacts
    tokenization: Disagreement | None


class Diagnosis:
    """start, stop; ask, look -> findings. `seen` has every (worker, code) that was ever found
    of the workers that there are.
    """

    def __init__(
        self,
        config: ServerConfig,
        fleet: Fleet,
        audit: Audit,
        prompts: Prompts,
        session: WorkerSession,
        *,
        connect_grace_s: float = 5.0,
    ) -> None:
        """`connect_grace_s`: how long an event stream may be away before that is a finding."""
        self.seen: set[tuple[str, Code]] = set()
        self.replica: Replica | None = None
        """What is wrong between routers is looked for, too, if it is set."""
        self._config, self._fleet, self._prompts = config, fleet, prompts
        self._audit, self._router = audit, audit.router
        self._prober = Prober(session, config.connect_timeout_s)
        self._connect_grace_s = connect_grace_s
        self._asked: dict[str, _Asked] = {}
        self._away_since: dict[Rank, float] = {}
        self._skips = RecentCounts(_RECENT_S)
        self._now: set[tuple[str, Code]] = set()
        self._looking: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Look from now on, every `health_interval_s`."""
        self._looking = asyncio.create_task(self._keep_looking(), name="diagnose")

    async def ask(self) -> None:
        """Ask the workers that are up what they say of themselves, unless that was just done."""
        await asyncio.gather(*map(self._ask_if_due, self._fleet.workers.values()))

    async def stop(self) -> None:
        """End what start began."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)

    def look(self) -> list[Finding]:
        """What is wrong now, as far as the engines were asked."""
        findings = check_all(self._views())
        if self.replica is not None:
            findings += check_replica(self.replica.status)
        now = {(finding.worker, finding.code) for finding in findings}
        for finding in findings:
            if (finding.worker, finding.code) not in self._now:
                logger.warning("%s: %s", _shown(finding.worker), finding)
        for worker, code in sorted(self._now - now):
            logger.info("%s: %s no longer holds", _shown(worker), code)
        self._now, self.seen = now, self.seen | now
        self._forget_removed()
        return findings

    def _forget_removed(self) -> None:
        """Nothing is kept of workers that the fleet has no more."""
        names = {*self._fleet.workers, CLUSTER}

        def is_gone(rank: str) -> bool:
            return not {rank, rank.rpartition("#")[0]} & names

        self.seen = {each for each in self.seen if not is_gone(each[0])}
        for name in self._asked.keys() - names:
            del self._asked[name]
        for rank in [each for each in self._away_since if each.worker not in names]:
            del self._away_since[rank]
        self._skips.forget(is_gone)

    async def _keep_looking(self) -> None:
        while True:
            try:
                await self.ask()
                self.look()
            except Exception:  # a mistake of ours here must not end the looking
                logger.exception("the diagnosis failed, looking again later")
            await asyncio.sleep(self._config.health_interval_s)

    async def _ask_if_due(self, worker: Worker) -> None:
        asked = self._asked_since_up(worker)
        if worker.is_up and (asked is None or time.monotonic() - asked.at_s > _ASK_AGAIN_S):
            num_times_up = worker.num_times_up
            facts = await self._prober.facts(worker.url or "")
            disagreement = await self._disagreement(worker, worker.url or "")
            now_s = time.monotonic()
            self._asked[worker.name] = _Asked(now_s, num_times_up, facts, disagreement)
            if facts.num_blocks is not None:
                for rank in worker.ranks:
                    with suppress(UnknownRankError):  # it may have gone while it was asked
                        self._router.set_cache_capacity(rank, facts.num_blocks)

    def _asked_since_up(self, worker: Worker) -> _Asked | None:
        """What it said, unless it was down since: it may be another engine."""
        asked = self._asked.get(worker.name)
        is_same = asked is not None and asked.num_times_up == worker.num_times_up
        return asked if worker.is_up and is_same else None

    async def _disagreement(self, worker: Worker, url: str) -> Disagreement | None:
        for model, served in sorted(worker.models.items()):
            if served.lora_name:
                continue  # an adapter has its model's tokenizer
            root = served.root
            tokenizer = await asyncio.to_thread(self._prompts.tokenizer_of, model, root)
            if tokenizer is None:
                continue
            if worker.tokenizer not in ("", tokenizer.digest):
                return Disagreement(ours=_file(tokenizer.digest), theirs=_file(worker.tokenizer))
            found = await compare_tokenization(self._prober, url, model, tokenizer)
            if found is not None:
                return found
        return None

    def _views(self) -> list[WorkerView]:
        ledgers, alone = self._audit.ledgers(), self._hashes_alone()
        return [
            self._view(worker, rank, ledgers.get(rank), is_alone=rank in alone)
            for worker in self._fleet.workers.values()
            for rank in worker.ranks
        ]

    def _view(
        self, worker: Worker, rank: Rank, ledger: RankLedger | None, *, is_alone: bool
    ) -> WorkerView:
        asked = self._asked_since_up(worker) or _Asked(0.0, 0, EngineFacts(), None)
        return WorkerView(
            rank=rank,
            down_because=worker.down_because,
            is_found=worker.url is not None,
            uses_events=self._fleet.uses_events,
            models={name: served.root for name, served in worker.models.items()},
            block_size=self._fleet.block_size_of(worker),
            cache_size=self._router.cache_size(rank),
            num_ranks=len(worker.sources),
            events=self._fleet.events_endpoint_of(rank),
            has_keys=self._config.events_key_file is not None,
            unreached=worker.sources[rank.dp_rank].unreached,
            topic=worker.spec.topic,
            stream=self._stream(worker, rank),
            ledger=ledger,
            facts=asked.facts,
            tokenization=asked.tokenization,
            untokenized=self._prompts.without_tokenizer,
            hashes_alone=is_alone,
        )

    def _hashes_alone(self) -> set[Rank]:
        """Ranks outside the largest engine hash space of their index."""
        alone: set[Rank] = set()
        for index in {self._router.index_of(rank) for rank in self._router.ranks}:
            hash_spaces = sorted(index.hash_spaces, key=lambda hash_space: -len(hash_space.ranks))
            alone |= {rank for hash_space in hash_spaces[1:] for rank in hash_space.ranks}
        return alone

    def _stream(self, worker: Worker, rank: Rank) -> StreamView | None:
        follower = self._fleet.follower_of(rank)
        if follower is None:
            return None
        state = follower.trust
        is_incomplete = state.level is Trust.STALE and state not in _KNOWN_MOST_LIKELY
        return StreamView(
            connected=not self._is_away(worker, follower),
            incomplete=state.reason if is_incomplete else None,
            fix=state.fix or "",
            can_replay=follower.can_replay or worker.sources[rank.dp_rank].events is None,
            answers=follower.about is not None and follower.about.answers_at is not None,
            names_extra_keys=follower.about is not None and follower.about.names_extra_keys,
            num_messages=follower.num_messages,
            num_stored=follower.num_stored,
            skipped=self._skips.of(str(rank), follower.skipped.copy(), time.monotonic()),
        )

    def _is_away(self, worker: Worker, follower: Follower) -> bool:
        """Whether its events have been unreachable for long, though it is up."""
        if follower.connected or not worker.is_up:
            self._away_since.pop(follower.rank, None)
            return False
        since = self._away_since.setdefault(follower.rank, time.monotonic())
        return time.monotonic() - since >= self._connect_grace_s


def _shown(worker: str) -> str:
    return worker if worker == CLUSTER else f"worker {worker}"


def _file(digest: str) -> str:
    return f"a tokenizer.json with the SHA-256 {digest}..."
