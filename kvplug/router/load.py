"""What each rank is busy with: the slot manager.

In:  a request is routed, has its first token, is finished.
Out: per rank, blocks of live requests (shared ones counted once) and tokens still to prefill.

Active blocks are the same relation as in the index, block x holder with counts, so they are kept
in the same arrays (index/holdings.py): a block that two live requests share on a rank is one
block with two copies.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvplug.hashing import Hashes
from kvplug.index.asking import NO_POOLS, Asking, one_rank_per_holder
from kvplug.index.holdings import Holdings, Stretch
from kvplug.kernels.reach import NUM_MASKS

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]


@dataclass(slots=True)
class ActiveRequest:
    """A request in flight on a rank."""

    rank_number: int
    sequence_hashes: Hashes
    prefill_tokens: int
    deadline_s: float


class Load(NamedTuple):
    """The load of each rank, by rank number, from the view of one request.

    prefill_tokens: int64[ranks], tokens of live requests without a first token;
    active_blocks: int64[ranks], distinct blocks of live requests, of the rank's own size (of its
    former one for requests that were in flight when that was learnt);
    active_depth: int64[ranks], leading blocks of this request that live requests there share.
    """

    prefill_tokens: I64
    active_blocks: I64
    active_depth: I64


class ActiveLoad:
    """start, first_token, finish, expire; of(request) -> Load."""

    def __init__(self, request_expiry_s: float) -> None:
        self.num_expired = 0
        self._expiry_s = request_expiry_s
        self._requests: OrderedDict[str, ActiveRequest] = OrderedDict()
        self._holdings = Holdings()
        self._prefill_tokens: I64 = np.zeros(0, dtype=np.int64)
        self._active_blocks: I64 = np.zeros(0, dtype=np.int64)
        self._asking = self._ask()

    def __len__(self) -> int:
        """Number of requests in flight."""
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    @property
    def prefill_tokens(self) -> I64:
        """int64[ranks], tokens of live requests without a first token."""
        return self._prefill_tokens

    @property
    def active_blocks(self) -> I64:
        """int64[ranks], distinct blocks of live requests."""
        return self._active_blocks

    def of(self, sequence_hashes: Hashes, num_ranks: int) -> Load:
        """What each rank is busy with, and how much of it this request would share."""
        self.reserve(num_ranks)
        depth = self.asking.overlap(sequence_hashes, 0.0).depth[:num_ranks]
        return Load(self._prefill_tokens[:num_ranks], self._active_blocks[:num_ranks], depth)

    def start(self, request_id: str, request: ActiveRequest) -> None:
        """A request was routed."""
        self.reserve(request.rank_number + 1)
        num_new = self._holdings.store(request.rank_number, Stretch(request.sequence_hashes))
        self._active_blocks[request.rank_number] += num_new or 0
        self._prefill_tokens[request.rank_number] += request.prefill_tokens
        self._requests[request_id] = request

    def first_token(self, request_id: str) -> None:
        """The prefill of a request is done; later calls do nothing."""
        request = self._requests.get(request_id)
        if request is not None:
            self._prefill_tokens[request.rank_number] -= request.prefill_tokens
            request.prefill_tokens = 0

    def finish(self, request_id: str) -> bool:
        """A request is over; returns False for one that is not in flight."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return False
        self._prefill_tokens[request.rank_number] -= request.prefill_tokens
        num_gone = self._holdings.drop(request.rank_number, request.sequence_hashes)
        self._active_blocks[request.rank_number] -= num_gone
        return True

    def expire(self, now_s: float) -> None:
        """Stop counting requests that nobody finished in time; they started in order."""
        while self._requests:
            request_id, request = next(iter(self._requests.items()))
            if request.deadline_s > now_s:
                return
            self.finish(request_id)
            self.num_expired += 1

    def forget(self, rank_number: int) -> None:
        """The rank is gone, and with it whatever it was busy with."""
        mine = [i for i, request in self._requests.items() if request.rank_number == rank_number]
        for request_id in mine:
            self.finish(request_id)

    def deadline_s(self, now_s: float) -> float:
        """When a request that starts now stops counting."""
        return now_s + self._expiry_s

    @property
    def asking(self) -> Asking:
        """The blocks of live requests as they are now, for a kernel that asks more than that."""
        if self._asking.num_changes != self._holdings.changes.count:
            self._asking = self._ask()
        return self._asking

    def _ask(self) -> Asking:
        num_ranks = len(self._active_blocks)
        credits = np.ones(NUM_MASKS + num_ranks)
        return Asking(self._holdings, one_rank_per_holder(num_ranks), NO_POOLS, credits)

    def reserve(self, num_ranks: int) -> None:
        """There are so many ranks."""
        missing = num_ranks - len(self._active_blocks)
        if missing > 0:
            padding = np.zeros(missing, dtype=np.int64)
            self._active_blocks = np.concatenate([self._active_blocks, padding])
            self._prefill_tokens = np.concatenate([self._prefill_tokens, padding])
            self._asking = self._ask()
