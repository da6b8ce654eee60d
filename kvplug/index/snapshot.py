"""An index to a file and back, exactly.

In:  a BlockIndex.   Out: a file (kvplug/index/snapshot_file.py), and an equal BlockIndex from it.

The file has the arrays of the index as they are, and in its settings who is behind the numbers in
them. What expires by itself (speculative blocks) and what the bounds gave up is not in it. What is
read is checked as `BlockIndex.check()` does before anybody gets it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvplug.errors import ConfigError, IndexCorruptError, SnapshotError
from kvplug.events import MoeLabel, Rank
from kvplug.index import snapshot_file
from kvplug.index.block_index import BlockIndex
from kvplug.index.block_store import ARRAYS
from kvplug.index.bounds import Bounds
from kvplug.index.cxl_states import Placement
from kvplug.kernels import holders, prefix_lengths, runs

U64 = npt.NDArray[np.uint64]
Arrays = dict[str, npt.NDArray[Any]]

_LOW, _SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)


class _Place(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A placement in a CXL pool (kvplug/index/cxl_states.py), and the holder of copies there."""

    rank: int
    pool_id: int | None
    workers: list[str] | None
    holder: int | None

    @property
    def placement(self) -> Placement:
        """In the index's words."""
        workers = None if self.workers is None else tuple(self.workers)
        return Placement(self.rank, self.pool_id, workers)


class _Label(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    label: MoeLabel
    number: int


class _Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """ranks: by number, None for one that is free; hash spaces: the ranks of each, of which number
    `common` takes new ranks; places and labels: by number, and with their numbers.
    """

    block_size: int
    ranks: list[Rank | None]
    confidence: list[float]
    hash_spaces: list[list[Rank]]
    common: int
    places: list[_Place | None]
    labels: list[_Label]


class Snapshot:
    """What a file is to have, taken from an index; until it is written only queries may come."""

    def __init__(self, index: BlockIndex) -> None:
        self._arrays: Arrays = dict(zip(ARRAYS, index.block_store.arrays, strict=True))
        # Queries write down in it which runs they have used.
        self._arrays["runs"] = self._arrays["runs"].copy()
        self._arrays["owner"] = index.numbers.owner
        self._arrays["cxl"], self._arrays["cxl_ring"] = index.cxl.states.arrays
        self._arrays["labels"] = index.labels.table.slots
        hash_spaces = index.hash_spaces.all
        for number, hash_space in enumerate(hash_spaces):
            self._arrays[f"names{number}"] = hash_space.table.slots
        self._settings = _Settings(
            block_size=index.block_size,
            ranks=list(index.numbers.ranks),
            confidence=index.confidence.tolist(),
            hash_spaces=[sorted(hash_space.ranks) for hash_space in hash_spaces],
            common=hash_spaces.index(index.hash_spaces.common),
            places=[_place(each) for each in index.cxl.placements.state()],
            labels=[_Label(*each) for each in index.labels.state()],
        )

    def write(self, path: Path) -> None:
        """Put the file in place; SnapshotError if that cannot be, and a former file stays."""
        snapshot_file.write(path, self._arrays, msgspec.to_builtins(self._settings))


def save(index: BlockIndex, path: Path) -> None:
    """Write the index to a file."""
    Snapshot(index).write(path)


def restore(
    path: Path,
    *,
    bounds: Bounds = Bounds(),  # noqa: B008 - immutable
    speculative_ttl_s: float = 2.0,
) -> BlockIndex:
    """The index that was saved; SnapshotError for a file that is not whole, not ours, not sound."""
    file = snapshot_file.read(path)
    try:
        settings = msgspec.convert(file.settings, _Settings)
        _require_sound(settings, file.arrays)
        index = BlockIndex(settings.block_size, speculative_ttl_s=speculative_ttl_s, bounds=bounds)
        _fill(index, settings, file.arrays)
        index.check()
    except (msgspec.ValidationError, ConfigError, IndexCorruptError) as error:
        raise SnapshotError(f"cannot restore an index from {path}: {error}") from error
    return index


def _place(state: tuple[Placement, int | None] | None) -> _Place | None:
    if state is None:
        return None
    (rank_number, pool_id, workers), holder = state
    return _Place(rank_number, pool_id, None if workers is None else list(workers), holder)


def _fill(index: BlockIndex, settings: _Settings, arrays: Arrays) -> None:
    places = [place for place in settings.places if place is not None]
    pools = {p.holder: (p.rank, tuple(p.workers or ())) for p in places if p.holder is not None}
    index.numbers.load(settings.ranks, arrays["owner"], pools)
    index.cxl.placements.load(
        [None if place is None else (place.placement, place.holder) for place in settings.places]
    )
    index.cxl.states.load(arrays["cxl"], arrays["cxl_ring"])
    index.labels.load([(each.label, each.number) for each in settings.labels], arrays["labels"])
    index.block_store.load([arrays[name] for name in ARRAYS])
    names = [arrays[f"names{number}"] for number in range(len(settings.hash_spaces))]
    index.hash_spaces.load(settings.hash_spaces, names, settings.common)
    index.confidence = np.array(settings.confidence, dtype=np.float64)


def _require_sound(settings: _Settings, arrays: Arrays) -> None:
    """Whatever a kernel takes for a position is one; IndexCorruptError if not."""
    names = [f"names{number}" for number in range(len(settings.hash_spaces))]
    expected = {*ARRAYS, "owner", "cxl", "cxl_ring", "labels", *names}
    _require(set(arrays) == expected, f"expected the arrays {sorted(expected)}")
    for name, array in arrays.items():
        dtype = {"intern": "uint32", "header": "int64", "owner": "int64"}.get(name, "uint64")
        _require(array.dtype == dtype, f"expected {dtype} in {name}, got {array.dtype}")
    for name in ("table", "copies", "cxl", "labels", *names):
        _require_table(name, arrays[name])
    _require_runs(arrays)
    _require_sets(arrays)
    _require_holders(settings, arrays)


def _require(is_sound: bool | np.bool_, message: str) -> None:
    if not is_sound:
        raise IndexCorruptError(message)


def _require_table(name: str, slots: U64) -> None:
    is_sound = len(slots) >= 4 and len(slots) % 2 == 0 and slots[-2] < len(slots) // 2 - 1
    _require(is_sound, f"{name} is no table")
    num_filled = np.count_nonzero(slots[1:-2:2])
    _require(num_filled == slots[-2], f"{name} has {num_filled} entries and says {slots[-2]}")


def _require_runs(arrays: Arrays) -> None:
    words, places = arrays["runs"], arrays["table"][1:-2:2]
    num_runs = len(words) // runs.WIDTH
    _require(num_runs > 1 and len(words) % runs.WIDTH == 0, "runs are no runs")
    _require((places & _LOW < num_runs).all(), "a block is in a run that is none")
    links = words.reshape(-1, runs.WIDTH)[:, int(runs.LINKS)]
    _require((links & _LOW < num_runs).all(), "a run is linked to one that is none")
    _require((links >> _SHIFT < num_runs).all(), "a run is linked to one that is none")
    starts = words.reshape(-1, runs.WIDTH)[:, int(runs.START)]
    is_free = words.reshape(-1, runs.WIDTH)[:, int(runs.USED)] >> _SHIFT == 0
    is_sound = 0 < starts[0] <= num_runs and (starts[is_free] <= num_runs).all()
    _require(is_sound, "the free runs are no list")


def _require_sets(arrays: Arrays) -> None:
    header, meta = arrays["header"], arrays["meta"]
    num_sets = len(meta) // 2
    words = int(header[holders.WORDS]) if len(header) > holders.NUM_HELD else 0
    has_counts = len(header) == holders.NUM_HELD + 64 * words
    is_sound = has_counts and words > 0 and num_sets > 1 and len(meta) % 2 == 0
    _require(is_sound, "the header of the sets is none")
    _require(len(arrays["bits"]) == num_sets * words, "sets have other bits than they say")
    _require((arrays["intern"] < num_sets).all(), "a set is interned that is none")
    _require(np.count_nonzero(arrays["intern"] == 0) > 0, "no slot for sets is empty")
    _require(0 < header[holders.FIRST_FREE] <= num_sets, "the free sets are no list")
    sets = arrays["runs"].reshape(-1, runs.WIDTH)[1:, int(runs.SET)]
    _require((sets < num_sets).all(), "a run has a set that is none")
    is_free = meta[::2] == 0
    _require((meta[1::2][is_free] <= num_sets).all(), "the free sets are no list")


def _require_holders(settings: _Settings, arrays: Arrays) -> None:
    owner, num_ranks = arrays["owner"], len(settings.ranks)
    known = [rank for rank in settings.ranks if rank is not None]
    _require(len(settings.confidence) == num_ranks, "ranks and what they are worth do not pair up")
    in_hash_spaces = sorted(rank for hash_space in settings.hash_spaces for rank in hash_space)
    _require(in_hash_spaces == sorted(known), "ranks and hash spaces do not pair up")
    _require(0 <= settings.common < len(settings.hash_spaces), "no hash space takes new ranks")
    _require((owner < prefix_lengths.NUM_CLASSES * num_ranks).all(), "a holder is nobody known")
    pools = sorted(np.flatnonzero(owner < -1).tolist())
    places = [place for place in settings.places if place is not None]
    known_pools = sorted(place.holder for place in places if place.holder is not None)
    _require(pools == known_pools, "pools and their holders do not pair up")
    _require(all(0 <= place.rank < num_ranks for place in places), "a pool is nobody's")
    words = int(arrays["header"][holders.WORDS])
    held = np.bitwise_or.reduce(arrays["bits"].reshape(-1, words), axis=0)
    bits = np.unpackbits(held.view(np.uint8), bitorder="little")
    _require((owner[np.flatnonzero(bits[: len(owner)])] != -1).all(), "a holder is nobody known")
    _require(not bits[len(owner) :].any(), "a holder is nobody known")
