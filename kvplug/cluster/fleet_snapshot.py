"""A snapshot of a fleet: all blocks that a router knows, and how far each follower has come.

In:  a router and its followers between two messages, the stream sequence that they have applied.
Out: bytes; from these the same blocks, and the positions at which followers go on.

Blocks and positions are of one moment, so what comes again later is dropped by its number, and what
is missing shows by its number. Blocks of a rank whose follower has no position (a stock
publisher, or one that was not heard yet) are left out: nobody could tell what is missing of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from kvplug.errors import SnapshotError
from kvplug.events import Rank
from kvplug.index import snapshot_file
from kvplug.index.snapshot_file import FileBytes, SnapshotFile
from kvplug.ingest.follower import Follower
from kvplug.ingest.position import FollowerPosition
from kvplug.router.core import Router
from kvplug.router.saved_fleet import as_array, from_array

FLEET_LAYOUT: Final = 1
"""Of the settings and arrays of a fleet; those of an index have a layout of their own."""

_POSITIONS: Final = "positions"


class _Position(msgspec.Struct, frozen=True):
    """rank: of the follower."""

    rank: Rank
    position: FollowerPosition


class FrozenFleet:
    """A fleet as it was at `seq`. Whatever happens to the router later, it stays as it is."""

    def __init__(self, seq: int, file: FileBytes) -> None:
        self.seq = seq
        self._file = file

    def encode(self) -> memoryview:
        """Its bytes, in any thread: checksums of all, some tens of ms for 10 million blocks."""
        return self._file.encode()


def freeze(router: Router, followers: Iterable[Follower], seq: int) -> FrozenFleet:
    """Copy all; call it in the thread that receives events, between two messages.

    `seq`: the stream sequence up to which everything is applied, and nothing beyond it. Requests
    are routed meanwhile.
    """
    positions = [
        _Position(follower.rank, position)
        for follower in followers
        if (position := follower.position()) is not None
    ]
    settings = {"fleet_layout": FLEET_LAYOUT, "seq": seq}
    return FrozenFleet(seq, router.freeze_indexes(settings, {_POSITIONS: as_array(positions)}))


def ranks_in(data: bytes | bytearray | memoryview) -> list[Rank]:
    """The ranks that a snapshot has blocks and a position of, sorted; SnapshotError."""
    return sorted(_positions_of(_read(data)))


def restore_fleet(
    router: Router, data: bytes | bytearray | memoryview
) -> dict[Rank, FollowerPosition]:
    """Begin with the blocks of a snapshot; returns the positions at which the followers of its
    ranks have to go on (`Follower.resume`), and of others nothing is in the index.

    Add workers first: what is of others is left out. SnapshotError, and nothing done, for bytes
    that are not those of a snapshot, or are damaged, or of another layout; ConfigError for a router
    that has blocks already.
    """
    file = _read(data)
    positions = _positions_of(file)
    taken = router.restore_indexes(file, positions.keys())
    return {rank: position for rank, position in positions.items() if rank in taken}


def _read(data: bytes | bytearray | memoryview) -> SnapshotFile:
    file = snapshot_file.decode(data)
    layout = file.settings.get("fleet_layout")
    if layout != FLEET_LAYOUT:
        raise SnapshotError(
            f"expected a fleet of layout {FLEET_LAYOUT}, got layout {layout} of kvplug "
            f"{file.kvplug_version}"
        )
    return file


def _positions_of(file: SnapshotFile) -> dict[Rank, FollowerPosition]:
    positions: list[_Position] = from_array(file.arrays.get(_POSITIONS), list[_Position])
    return {each.rank: each.position for each in positions}
