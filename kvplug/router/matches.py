"""What each rank has of a prompt, by name of the rank, whatever index it is in.

In:  a prompt, an expert if one is asked for.   Out: OverlapScores.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np
import numpy.typing as npt

from kvplug.events import MoeLabel, Rank
from kvplug.index.block_copies import BlockCopies
from kvplug.router.fleet_index import FleetIndex
from kvplug.router.moe import aligned_blocks
from kvplug.router.prompt import Prompt

I64 = npt.NDArray[np.int64]


class OverlapScores(msgspec.Struct, frozen=True, kw_only=True):
    """Leading blocks of a prompt without a gap, of every rank that was asked for; 0 where it has
    none.

    scores: in any memory, or expected there; device, host, disk: in GPU memory, there or in host
    memory, in any of these or on disk; cxl_accessible_scores: in GPU memory, or in CXL pools that
    the rank can read; moe_scores: of the blocks that it holds, those that are labelled with the
    expert; empty without a query.
    """

    scores: Mapping[Rank, int]
    device: Mapping[Rank, int]
    host: Mapping[Rank, int]
    disk: Mapping[Rank, int]
    cxl_accessible_scores: Mapping[Rank, int]
    moe_scores: Mapping[Rank, int]


def find_matches(
    fleet_index: FleetIndex,
    prompt: Prompt,
    workers: set[str] | None,
    label: MoeLabel | None,
    now_s: float,
) -> OverlapScores:
    """For the ranks of these workers; None: of all."""
    names = ("scores", "device", "host", "disk", "cxl_accessible_scores")
    found: dict[str, dict[Rank, int]] = {name: {} for name in (*names, "moe_scores")}
    for group in fleet_index.groups:
        overlap = group.index.overlap(prompt.hashes(group.index.hasher), now_s)
        rows = overlap.depth, overlap.device, overlap.host, overlap.disk, overlap.cxl_accessible
        for name, row in zip(names, rows, strict=True):
            found[name].update(_by_rank(group.index.numbers.ranks, row, workers))
    if label is not None:
        aligned = aligned_blocks(fleet_index, prompt, label, now_s)
        found["moe_scores"].update(_by_rank(fleet_index.numbers.ranks, aligned, workers))
    return OverlapScores(**found)


def find_holders(fleet_index: FleetIndex, prompt: Prompt) -> list[dict[Rank, BlockCopies]]:
    """Who has each full block; ConfigError for a fleet with several block sizes."""
    fleet_index.require_one_block_size("find the holders of blocks")
    found: list[dict[Rank, BlockCopies]] = []
    for group in fleet_index.groups:
        held = group.index.holders_of(prompt.hashes(group.index.hasher))
        found += [{} for _ in range(len(held) - len(found))]
        for of_block, more in zip(found, held, strict=False):  # blocks of pairs are one fewer
            of_block.update(more)
    return found


def _by_rank(ranks: list[Rank | None], row: I64, workers: set[str] | None) -> dict[Rank, int]:
    return {
        rank: count
        for rank, count in zip(ranks, row.tolist(), strict=True)
        if rank is not None and (workers is None or rank.worker in workers)
    }
