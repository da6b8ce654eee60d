"""What each rank would be busy with if a request went there.

In:  a prompt, the load of the fleet.   Out: a PotentialLoad per rank; nothing is counted.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from kvplug.events import Rank
from kvplug.kernels import active_blocks, costing
from kvplug.router.decider import Decider
from kvplug.router.fleet_index import FleetIndex
from kvplug.router.load import ActiveLoad
from kvplug.router.prompt import Prompt

I64 = npt.NDArray[np.int64]


class PotentialLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Of one rank, with the request and without booking it.

    potential_prefill_tokens: prompt tokens that it would have to compute; potential_decode_blocks:
    distinct blocks of requests in flight, the full blocks of this prompt and blocks of answers
    included.
    """

    rank: Rank
    potential_prefill_tokens: int
    potential_decode_blocks: int


def potential_loads(
    prompt: Prompt, fleet_index: FleetIndex, load: ActiveLoad, decider: Decider, now_s: float
) -> list[PotentialLoad]:
    """For every rank of the fleet, in the order of their numbers."""
    numbers, found = fleet_index.numbers, {}
    new_tokens = decider.new_tokens(prompt, now_s)
    for group in fleet_index.groups:
        hashes = prompt.hashes(group.index.hasher)
        shared: I64 = np.empty(len(numbers.ranks), dtype=np.int64)
        active_blocks.fill_shared(load.active.slots, hashes, shared)
        for number in group.numbers.tolist():
            if numbers.ranks[number] is None:  # it has left
                continue
            row = load.ranks[number]
            found[number] = PotentialLoad(
                rank=numbers.rank(number),
                potential_prefill_tokens=round(row[costing.PREFILL_TOKENS] + new_tokens[number]),
                potential_decode_blocks=round(
                    row[costing.ACTIVE_BLOCKS] + len(hashes) - shared[number]
                ),
            )
    return [found[number] for number in sorted(found)]
