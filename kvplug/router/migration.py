"""Migration: a request in flight goes on elsewhere when its worker has failed.

In:  a request in flight, its prompt with the tokens generated so far, workers to leave out.
Out: a Migration: the request booked on another rank, and what it finds there.

Ranks that can read the blocks of the request in a CXL pool come first, because they go on without
a prefill: those that reach at least half as much of the prompt, on their device and in pools, as
the one that reaches most. Among them, and among all if there is no such rank, the mode and the cost
decide as for any request.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import structs

from kvplug.errors import NoWorkerError
from kvplug.events import Rank
from kvplug.router.constraints import checked_names
from kvplug.router.decider import Decider, Decision, Plan
from kvplug.router.fleet_index import FleetIndex
from kvplug.router.load import ActiveLoad
from kvplug.router.options import RequestOptions
from kvplug.router.prompt import Prompt

I64 = npt.NDArray[np.int64]


class Migration(msgspec.Struct, frozen=True, kw_only=True):
    """Where a request goes on, and why.

    decision: on the new rank, under the same request id, of the prompt with the tokens generated so
    far; failed: the rank that it was on; reached_blocks: leading blocks that the new rank has, on
    its device, in lower tiers or in a CXL pool that it can read, `reached_tokens` in tokens;
    recomputed_tokens: the rest, which it has to compute, and at least the last token;
    cxl_accessible: of each rank that could have taken it, leading blocks on its device or in pools
    that it can read.
    """

    decision: Decision
    failed: Rank
    reached_blocks: int
    reached_tokens: int
    recomputed_tokens: int
    cxl_accessible: dict[Rank, int]


class _Reach(NamedTuple):
    """int64[ranks of the fleet]: leading blocks of a prompt by where they are, and their size."""

    device: I64
    accessible: I64
    held: I64
    block_size: I64


class Migrations(NamedTuple):
    """migrate. Not thread-safe; Router holds a lock.

    `on_moved` is called with the request id between the end of the old booking and the decision.
    """

    fleet_index: FleetIndex
    load: ActiveLoad
    decider: Decider
    on_moved: Callable[[str], None]

    def migrate(
        self,
        request_id: str,
        prompt: Prompt,
        exclude: frozenset[str],
        options: RequestOptions,
        now_s: float,
    ) -> Migration:
        """Book the request on the best rank of another worker, and release the old booking.

        UnknownRequestError if it is not in flight; NoWorkerError, and nothing changed, if nobody
        can take it.
        """
        failed = self.fleet_index.numbers.rank(self.load.request(request_id).rank_number)
        options = self._without(exclude | {failed.worker}, options)
        _ = options.max_answer_tokens  # checked before anything changes
        try:
            plan = self.decider.plan(prompt, options, now_s)
        except NoWorkerError as error:
            message = f"cannot migrate request {request_id!r} from {failed}: {error}"
            raise NoWorkerError(message, constraint=error.constraint) from error
        reach = self._reach(prompt, now_s)
        preferred = plan._replace(candidates=_nearest(plan.candidates, reach))
        self.load.withdraw(request_id, now_s)  # blocks of its answer are of the prompt now
        self.on_moved(request_id)
        decision = self.decider.decide(prompt, request_id, preferred, options, now_s)
        return self._migration(decision, failed, len(prompt), plan, reach)

    def _without(self, excluded: frozenset[str], options: RequestOptions) -> RequestOptions:
        if options.workers is None:
            allowed = frozenset(rank.worker for rank in self.fleet_index.numbers.ranks if rank)
        else:
            allowed = checked_names(options.workers, "workers")
        return structs.replace(options, workers=allowed - excluded)

    def _reach(self, prompt: Prompt, now_s: float) -> _Reach:
        num_ranks = len(self.fleet_index.numbers.ranks)
        reach = _Reach(*(np.zeros(num_ranks, dtype=np.int64) for _ in _Reach._fields))
        for group in self.fleet_index.groups:
            overlap = group.index.overlap(prompt.hashes(group.index.hasher), now_s)
            here, index_ranks = group.numbers, group.index_ranks(num_ranks)[group.numbers]
            reach.device[here] = overlap.device[index_ranks]
            reach.accessible[here] = overlap.cxl_accessible[index_ranks]
            reach.held[here] = overlap.held[index_ranks]
            reach.block_size[here] = group.block_size
        return reach

    def _migration(
        self, decision: Decision, failed: Rank, num_tokens: int, plan: Plan, reach: _Reach
    ) -> Migration:
        numbers = self.fleet_index.numbers
        reached_blocks = int(reach.held[numbers.number_of(decision.rank)])
        reached_tokens = reached_blocks * decision.block_size
        return Migration(
            decision=decision,
            failed=failed,
            reached_blocks=reached_blocks,
            reached_tokens=reached_tokens,
            recomputed_tokens=max(num_tokens - reached_tokens, min(1, num_tokens)),
            cxl_accessible={
                numbers.rank(number): int(reach.accessible[number])
                for number in plan.candidates.tolist()
            },
        )


def _nearest(candidates: I64, reach: _Reach) -> I64:
    """Those that come first; all of them if none reads a block of the prompt in a pool."""
    accessible = (reach.accessible * reach.block_size)[candidates]  # sizes may differ
    reads_pool = reach.accessible[candidates] > reach.device[candidates]
    if not reads_pool.any():
        return candidates
    # Not only those with the most: a block more on one device is no reason to send it everything
    # that a failed worker leaves behind.
    return np.asarray(candidates[2 * accessible >= accessible[reads_pool].max()])
