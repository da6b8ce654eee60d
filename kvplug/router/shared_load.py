"""The load of several routers of one fleet in each of them: beside its own, that of the others.

In:  rows of the others' load, prompts that they have sent to ranks.
Out: the load that the next decision reads; what ranks are expected to hold; the forecast of caches.

The others are processes of one machine (kvplug/shared), or replicas (kvplug/cluster). A rank is
about to hold what any of them has sent there, and to lose what it evicts for it.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvplug.events import Rank
from kvplug.hashing import Hashes
from kvplug.kernels import costing
from kvplug.router.config import RouterConfig
from kvplug.router.decider import Decider
from kvplug.router.fleet_index import FleetIndex
from kvplug.router.load import ActiveLoad

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]

_LONGEST_QUEUE_S: Final = 30.0  # as in kernels/routing.py


class Sent(NamedTuple):
    """A prompt that another router has sent to a rank: its hashes, of which those that begin a
    chunk of the forecast matter (kernels/forecast.py); the blocks of it that the rank is about to
    hold; how many come to it; its predicted time to first token.
    """

    rank: Rank
    hashes: Hashes
    expected: Hashes
    num_coming: float
    own_ms: float


class SharedLoad:
    """take, note_sent, note_prefill, note_last_request. Not thread-safe: for whoever holds the
    router's lock.
    """

    def __init__(
        self, config: RouterConfig, decider: Decider, fleet_index: FleetIndex, load: ActiveLoad
    ) -> None:
        self._config, self._decider = config, decider
        self._fleet_index, self._load = fleet_index, load

    def take(self, rows: F64, own: int, num_routers: int, slots: I64) -> None:
        """Count what the others have sent (kernels/peer_load.py has the arguments)."""
        self._load.set_peers(rows, own, num_routers, slots)

    def note_prefill(self, number: int, num_tokens: float, now_s: float) -> None:
        """The rank has computed so many prompt tokens for another one."""
        self._load.note_peer_prefill(number, num_tokens, now_s)

    def note_last_request(self, now_ms: float) -> None:
        """When another one routed a request last."""
        self._decider.note_last_request(now_ms)

    def note_sent(self, sent: Sent, now_s: float) -> None:
        """Another one has sent a prompt to a rank; nothing is done for one that is unknown here."""
        if sent.rank not in self._fleet_index.numbers:
            return
        number = self._fleet_index.numbers.number_of(sent.rank)
        index = self._fleet_index.group_of(sent.rank).index
        if sent.rank in index.numbers:
            coming_s = now_s + min(sent.own_ms / 1e3, _LONGEST_QUEUE_S)
            at = index.numbers.number_of(sent.rank)
            index.speculative.insert(at, sent.expected, coming_s)
        if self._config.is_cost_in_ms:
            row = self._load.ranks[number]
            capacity = max(row[costing.CAPACITY_BLOCKS], row[costing.RESIDENT_BLOCKS])
            if capacity > 0:
                coming = round(sent.num_coming)
                self._load.forecast.use(number, sent.hashes, coming, int(capacity))
