"""Requests that another than the router has placed: counted where they really are.

In:  a request in flight that the data plane took to another rank; a reservation that a peer made.
Out: the load of that rank, with what it holds of the prompt.

The times of such a request tell nothing of how fast the rank is: nobody knows when it came there.
"""

from __future__ import annotations

import random

import numpy as np
import numpy.typing as npt

from kvplug.hashing import Hashes
from kvplug.kernels import active_blocks
from kvplug.router.decider import Decider
from kvplug.router.fleet_index import FleetIndex
from kvplug.router.index_group import IndexGroup
from kvplug.router.load import ActiveLoad, ActiveRequest
from kvplug.router.prompt import NO_TOKENS, Prompt

I64 = npt.NDArray[np.int64]


class Bookings:
    """move, adopt. Not thread-safe; Router holds a lock."""

    def __init__(self, decider: Decider, fleet_index: FleetIndex, load: ActiveLoad) -> None:
        self._decider, self._fleet_index, self._load = decider, fleet_index, load

    def move(self, request_id: str, number: int, now_s: float) -> bool:
        """The request is on that rank now, which has its prompt to compute; nothing is done if it
        is there already. False if it is not in flight.
        """
        known = self._load.find(request_id)
        if known is None or known.rank_number == number:
            return known is not None
        before, outputs = self._load.withdraw(request_id, now_s)
        self._expect_no_more(before)
        hashes = self._hashes_on(before, number)
        prompt = Prompt(NO_TOKENS, 0, hashes, before.num_tokens)
        request, own_ms = self._decider.book(prompt, number, now_s, is_new=False)
        request.is_timed = False
        presumed_s = None
        if not before.reports_first_token:
            presumed_s = self._decider.unreported.expect(request, own_ms)
        self._load.start(request_id, request, presumed_s)
        if outputs is not None:
            self._load.take_outputs(request, outputs)
        return True

    def adopt(
        self,
        request_id: str,
        number: int,
        hashes: Hashes,
        num_tokens: int,
        now_s: float,
        prefill_tokens: int | None,
    ) -> None:
        """A request of a peer is on that rank; `prefill_tokens`: that the peer expects to be
        computed, if it is not what this router finds.
        """
        prompt = Prompt(NO_TOKENS, 0, hashes, num_tokens)
        request, _ = self._decider.book(prompt, number, now_s, is_new=True)
        request.is_timed = False
        self._load.start(request_id, request)
        if prefill_tokens is not None:
            self._load.set_prefill(request, prefill_tokens, self._group_of(number).block_size)

    def _expect_no_more(self, request: ActiveRequest) -> None:
        """The rank that a request has left will not store its blocks, but for those that others in
        flight there have. Without events, what was sent there is all that is known.
        """
        if self._load.counts_sent:
            return
        depths: I64 = np.empty(len(self._fleet_index.numbers.ranks), dtype=np.int64)
        active_blocks.fill_shared(self._load.active.slots, request.sequence_hashes, depths)
        gone = request.sequence_hashes[depths[request.rank_number] :]
        index = self._group_of(request.rank_number).index
        rank = self._fleet_index.numbers.rank(request.rank_number)
        index.speculative.confirm(index.numbers.number_of(rank), gone)

    def _hashes_on(self, request: ActiveRequest, number: int) -> Hashes:
        """Those of the prompt. Where blocks are others, nobody knows them: random ones, so that it
        shares nothing.
        """
        group = self._group_of(number)
        if group.blocks == self._group_of(request.rank_number).blocks:
            return request.sequence_hashes
        num_blocks = group.index.hasher.num_blocks(request.num_tokens)
        return np.frombuffer(bytearray(random.randbytes(8 * num_blocks)), dtype=np.uint64)

    def _group_of(self, number: int) -> IndexGroup:
        return self._fleet_index.group_of(self._fleet_index.numbers.rank(number))
