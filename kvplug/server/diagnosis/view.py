"""What is known of one rank of a worker, in the terms of the checks.

In:  nothing; the parts that know fill it in.   Out: WorkerView.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvplug.audit.ledger import RankLedger
from kvplug.events import Rank
from kvplug.router.cache_sizes import CacheSize
from kvplug.server.diagnosis.facts import EngineFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamView:
    """A worker's event stream. incomplete: why not all of its blocks are known,
    or None; fix: of that; can_replay: whether the router can ask for what it missed; answers: the
    publisher said itself where to ask; names_extra_keys: it says of which extra_key blocks are.
    """

    connected: bool
    incomplete: str | None = None
    fix: str = ""
    can_replay: bool = True
    answers: bool = False
    names_extra_keys: bool = False
    num_messages: int = 0
    num_stored: int = 0
    skipped: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True, kw_only=True)
class Disagreement:
    """Two counts or two texts that should be equal."""

    ours: str
    theirs: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """One data-parallel rank of a worker. models: name -> where it was loaded from.

    is_found: whether it is known where its API is; uses_events: whether the router goes by events;
    block_size (None until it is known), cache_size, num_ranks, topic: what the router goes by;
    events: the endpoint that is followed; has_keys: whether only publishers with a key are;
    unreached: where it publishes, if that is out of reach;
    stream, ledger: None where no router follows the worker; tokenization: how a probe differed;
    untokenized: models whose text cannot be tokenized here, though it was asked for;
    hashes_alone: its engine hashes differ from the other workers' for equal blocks.
    """

    rank: Rank
    down_because: str | None = None
    is_found: bool = True
    uses_events: bool = True
    models: Mapping[str, str] = field(default_factory=dict)
    block_size: int | None = None
    cache_size: CacheSize = field(default_factory=CacheSize)
    num_ranks: int = 1
    events: str | None = None
    has_keys: bool = False
    unreached: str | None = None
    topic: str = ""
    stream: StreamView | None = None
    ledger: RankLedger | None = None
    facts: EngineFacts = field(default_factory=EngineFacts)
    tokenization: Disagreement | None = None
    untokenized: frozenset[str] = frozenset()
    hashes_alone: bool = False

    @property
    def worker(self) -> str:
        """Its name."""
        return self.rank.worker

    @property
    def name(self) -> str:
        """Of the rank, for findings: the worker's name, with #1 for rank 1."""
        return str(self.rank)


class RecentCounts:
    """Of ever-growing counts, those that a view shows: what was skipped long ago is history.

    of(worker, counts, now_s): what grew in the last `window_s`, with its whole count.
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._grew: dict[tuple[str, str], tuple[int, float]] = {}

    def forget(self, is_gone: Callable[[str], bool]) -> None:
        """Workers of which this is true."""
        for worker, reason in [each for each in self._grew if is_gone(each[0])]:
            del self._grew[worker, reason]

    def of(self, worker: str, counts: Counter[str], now_s: float) -> Counter[str]:
        """A reason that is seen for the first time has just grown."""
        for reason, count in counts.items():
            last, _ = self._grew.get((worker, reason), (0, now_s))
            if count != last:
                self._grew[worker, reason] = count, now_s
        return Counter(
            {
                reason: count
                for reason, count in counts.items()
                if count and now_s - self._grew[worker, reason][1] < self._window_s
            }
        )
