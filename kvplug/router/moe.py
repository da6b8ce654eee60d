"""Expert labels: how many blocks of a prompt carry one, on each rank.

In:  a prompt, a label.   Out: int64[ranks of the fleet].
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvplug.events import MoeLabel
from kvplug.index.moe_labels import MoeLabels
from kvplug.router.fleet_index import FleetIndex
from kvplug.router.prompt import Prompt

I64 = npt.NDArray[np.int64]


def aligned_blocks(fleet_index: FleetIndex, prompt: Prompt, label: MoeLabel, now_s: float) -> I64:
    """int64[ranks]: of the leading blocks that each rank holds, those that carry the label."""
    aligned: I64 = np.zeros(len(fleet_index.numbers.ranks), dtype=np.int64)
    for group in fleet_index.groups:
        hashes = prompt.hashes(group.index.hasher)
        held = group.index.overlap(hashes, now_s).held
        counts = group.index.annotation(MoeLabels).num_aligned(hashes, label, held)
        if group.fleet_numbers is None:
            aligned[: len(counts)] = counts
        else:
            here = np.flatnonzero(group.fleet_numbers >= 0)
            aligned[group.fleet_numbers[here]] = counts[here]
    return aligned
