"""One engine as the router sees it.

In:  a worker spec; what the engine answers and publishes.   Out: whether it is up, its ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvplug.events import Rank
from kvplug.ingest.follower import Follower
from kvplug.protocol import WorkerHello
from kvplug.server.config import WorkerSpec
from kvplug.server.workers.model_cards import Cards, Served
from kvplug.server.workers.rank_sources import RankSource


@dataclass(slots=True)
class Worker:
    """`down_because` is None while it is up.

    url: of its API; None until its publisher says it, if it was named by its event endpoint;
    sources: of the events of each data-parallel rank; followers: of those that publish; models: by
    name, what it serves, adapters included; cards: by name, what it says of each; lora_paths: by
    adapter, where it was last loaded from, of former adapters, too; tokenizer: the digest that its
    hello said last; names_extra_keys: as its hello said last; root: where it loaded its tokenizer
    from, if /v1/models does not say it; num_times_up: how often it came up, as each time it may be
    another engine; num_failed_looks: since it last answered one; taints: names that
    requests may require or prefer; is_draining: it gets no new requests.
    """

    spec: WorkerSpec
    sources: list[RankSource] = field(default_factory=list)
    followers: dict[int, Follower] = field(default_factory=dict)
    down_because: str | None = "not looked at yet"
    models: dict[str, Served] = field(default_factory=dict)
    cards: Cards = field(default_factory=dict)
    lora_paths: dict[str, str] = field(default_factory=dict)
    tokenizer: str = ""
    names_extra_keys: bool = False
    root: str = ""
    num_times_up: int = 0
    num_failed_looks: int = 0
    taints: frozenset[str] = frozenset()
    is_draining: bool = False
    url: str | None = field(init=False)

    def __post_init__(self) -> None:
        self.url = self.spec.url

    @property
    def name(self) -> str:
        """By which the router knows it, whatever becomes of it."""
        return self.spec.name

    @property
    def about(self) -> WorkerHello | None:
        """What the publisher of its first rank said of it last; None for a stock one."""
        return self.followers[0].about if 0 in self.followers else None

    @property
    def is_up(self) -> bool:
        """Whether requests are sent to it."""
        return self.down_because is None

    @property
    def state(self) -> str:
        """`unknown`: nobody has said yet where its API is."""
        if self.is_up:
            return "draining" if self.is_draining else "up"
        return "unknown" if self.url is None else "down"

    @property
    def ranks(self) -> list[Rank]:
        """Its data-parallel ranks, in order."""
        return [Rank(self.name, number) for number in range(len(self.sources))]

    @property
    def shown(self) -> str:
        """For the log: its name, and where it is if that is something else."""
        return self.name if self.url in (None, self.name) else f"{self.name} ({self.url})"
