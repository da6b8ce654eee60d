"""An index to a file and back, exactly.

In:  a BlockIndex.   Out: settings and arrays, a file of them (kvplug/index/snapshot_file.py), and
an equal BlockIndex from either.

The file has the arrays of the index as they are, its settings say who is behind the numbers in
them, and each annotation adds its own (docs/snapshot-format.md, "What an index writes"). What
expires by itself (speculative blocks) and what the bounds gave up are not in it. What is read is
checked as `BlockIndex.check()` does before anybody gets it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack

import msgspec
import numpy as np
import numpy.typing as npt

from kvplug.errors import ConfigError, IndexCorruptError, SnapshotError
from kvplug.events import Rank
from kvplug.index import snapshot_file
from kvplug.index.block_annotation import BlockAnnotation
from kvplug.index.block_index import BlockIndex
from kvplug.index.block_store import ARRAYS
from kvplug.index.bounds import Bounds
from kvplug.index.cache_groups import CacheGroup, GroupKind, RankGroups
from kvplug.index.event_applier import Flag
from kvplug.index.hash_table import require_sound
from kvplug.index.lower_tiers import OffloadingRank
from kvplug.index.prefix_query import TierCredits
from kvplug.index.snapshot_file import SnapshotFile
from kvplug.kernels import holders, prefix_lengths, runs

U64 = npt.NDArray[np.uint64]
Arrays = dict[str, npt.NDArray[Any]]

_LOW, _SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)


LAYOUT = 5
"""Of the settings and arrays of an index; in layout 1 annotations were part of the index, layout 2
forgot `bigrams`, layout 3 had no KV cache groups, layout 4 neither families
of runs nor buckets in its tables."""


class _Pool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """holder: of a rank's copies that the workers can read, too."""

    holder: int
    rank: int
    workers: tuple[str, ...]


class _Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A KV cache group that is not the main one of its rank."""

    number: int
    holder: int
    attention: str
    sliding_window: int | None


class _RankGroups(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """rank: its number."""

    rank: int
    main: int | None
    others: list[_Group]


class _Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """ranks, confidence: by number, ranks None where one is free; hash_spaces: the ranks of each,
    of which number `common` takes new ranks; annotations: what each one says of itself;
    adapter_seeds: of the namespaces of LoRA adapters; offloading: ranks with copies in lower tiers.
    """

    layout: int
    block_size: int
    bigrams: bool
    ranks: list[Rank | None]
    confidence: list[float]
    hash_spaces: list[list[Rank]]
    common: int
    pools: list[_Pool]
    groups: list[_RankGroups]
    annotations: dict[str, Any]
    adapter_seeds: dict[str, list[int]]
    offloading: list[OffloadingRank]


class IndexOptions(TypedDict, total=False):
    """What an index is made with besides its content, as BlockIndex."""

    bounds: Bounds
    speculative_ttl_s: float
    query_waiting: Flag | None
    tier_credits: TierCredits
    annotations: Sequence[type[BlockAnnotation]]


class Snapshot:
    """What a file is to have, taken from an index; until it is written only queries may come.

    arrays: by name, the index's own.
    """

    def __init__(self, index: BlockIndex) -> None:
        self.arrays: Arrays = dict(zip(ARRAYS, index.block_store.arrays, strict=True))
        self.arrays["owner"] = index.numbers.owner
        hash_spaces, pools = index.hash_spaces.all, index.numbers.pools
        for name, hash_space in zip(_table_names(len(hash_spaces)), hash_spaces, strict=True):
            self.arrays[name] = hash_space.table.slots
        annotations, arrays = index.annotations.save()
        self.arrays.update(arrays)
        self._settings = _Settings(
            layout=LAYOUT,
            block_size=index.block_size,
            bigrams=index.bigrams,
            ranks=list(index.numbers.ranks),
            confidence=index.confidence.tolist(),
            hash_spaces=[sorted(hash_space.ranks) for hash_space in hash_spaces],
            common=hash_spaces.index(index.hash_spaces.common),
            pools=[_Pool(holder, *behind) for holder, behind in pools.items()],
            groups=[_rank_groups(*each) for each in index.cache_groups.items()],
            annotations=annotations,
            adapter_seeds=index.adapters.items(),
            offloading=index.lower_tiers.save(),
        )

    @property
    def settings(self) -> bytes:
        """What is to be known besides, as JSON."""
        return msgspec.json.encode(self._settings)

    def write(self, path: Path) -> None:
        """Put the file in place; SnapshotError if that cannot be, and a former file stays."""
        # Queries write down in it which runs they have used.
        arrays = self.arrays | {"runs": self.arrays["runs"].copy()}
        snapshot_file.write(path, arrays, msgspec.json.decode(self.settings))


def save(index: BlockIndex, path: Path) -> None:
    """Write the index to a file."""
    Snapshot(index).write(path)


def restore(path: Path, **options: Unpack[IndexOptions]) -> BlockIndex:
    """The index that was saved; SnapshotError for a file that is not whole, not ours, not sound.

    An annotation that the file does not have is empty; one that only the file has is refused.
    """
    file = snapshot_file.read(path)
    try:
        return restored(file, **options)
    except SnapshotError as error:
        raise SnapshotError(f"cannot restore an index from {path}: {error}") from error


def restored(file: SnapshotFile, **options: Unpack[IndexOptions]) -> BlockIndex:
    """As `restore`, of what a file held."""
    try:
        _require_layout(file)
        settings = msgspec.convert(file.settings, _Settings)
        _require_sound(settings, file.arrays)
        index = BlockIndex(settings.block_size, bigrams=settings.bigrams, **options)
        _fill(index, settings, file.arrays)
        index.capacity_guard.settle()
        index.check()
    except (msgspec.ValidationError, ConfigError, IndexCorruptError) as error:
        raise SnapshotError(f"this is no sound index: {error}") from error
    return index


def _table_names(num_hash_spaces: int) -> list[str]:
    return [f"engine_hashes{number}" for number in range(num_hash_spaces)]


def _fill(index: BlockIndex, settings: _Settings, arrays: Arrays) -> None:
    pools = {pool.holder: (pool.rank, pool.workers) for pool in settings.pools}
    holders_of = {each.rank: [group.holder for group in each.others] for each in settings.groups}
    index.numbers.load(settings.ranks, arrays["owner"], pools, holders_of)
    index.cache_groups.load({each.rank: _groups_of(each) for each in settings.groups})
    index.block_store.load([arrays[name] for name in ARRAYS])
    tables = [arrays[name] for name in _table_names(len(settings.hash_spaces))]
    index.hash_spaces.load(settings.hash_spaces, tables, settings.common)
    of_annotations = {name: array for name, array in arrays.items() if "." in name}
    index.annotations.load(settings.annotations, of_annotations)
    index.adapters.load(settings.adapter_seeds)
    index.lower_tiers.load(settings.offloading)
    index.confidence = np.array(settings.confidence, dtype=np.float64)


def _rank_groups(rank_number: int, groups: RankGroups) -> _RankGroups:
    others = [_Group(number, other.holder, *other.kind) for number, other in groups.others.items()]
    return _RankGroups(rank_number, groups.main, others)


def _groups_of(saved: _RankGroups) -> RankGroups:
    others = {
        each.number: CacheGroup(each.holder, GroupKind(each.attention, each.sliding_window))
        for each in saved.others
    }
    return RankGroups(saved.main, others)


def _require_layout(file: SnapshotFile) -> None:
    layout = file.settings.get("layout", 1)  # the first one had no number
    if layout != LAYOUT:
        raise SnapshotError(
            f"expected an index of layout {LAYOUT}, got layout {layout} of kvplug "
            f"{file.kvplug_version}"
        )


def _require_sound(settings: _Settings, arrays: Arrays) -> None:
    """Whatever a kernel takes for a position is one; IndexCorruptError if not."""
    tables = _table_names(len(settings.hash_spaces))
    expected = {*ARRAYS, "owner", *tables}
    _require(
        {name for name in arrays if "." not in name} == expected,
        f"expected the arrays {sorted(expected)}",
    )
    for name, array in arrays.items():
        dtype = {"intern": "uint32", "header": "int64", "owner": "int64"}.get(name, "uint64")
        _require(array.dtype == dtype, f"expected {dtype} in {name}, got {array.dtype}")
    for name in ("table", "copies", *tables):
        require_sound(name, arrays[name])
    _require_runs(arrays)
    _require_sets(arrays)
    _require_holders(settings, arrays)


def _require(is_sound: bool | np.bool_, message: str) -> None:
    if not is_sound:
        raise IndexCorruptError(message)


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
    sets = arrays["runs"].reshape(-1, runs.WIDTH)[1:, int(runs.SET)] & _LOW
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
    known_pools = [pool.holder for pool in settings.pools]
    groups = [group.holder for each in settings.groups for group in each.others]
    _require(pools == sorted(known_pools + groups), "pools and their holders do not pair up")
    ranks_with_groups = [each.rank for each in settings.groups]
    _require(len(set(ranks_with_groups)) == len(ranks_with_groups), "a rank has groups twice")
    _require(
        all(0 <= n < num_ranks and settings.ranks[n] is not None for n in ranks_with_groups),
        "a KV cache group is nobody's",
    )
    _require(
        all(0 <= each.rank < num_ranks and each.num_copies >= 0 for each in settings.offloading),
        "what is offloaded is nobody's",
    )
    _require(all(0 <= pool.rank < num_ranks for pool in settings.pools), "a pool is nobody's")
    words = int(arrays["header"][holders.WORDS])
    held = np.bitwise_or.reduce(arrays["bits"].reshape(-1, words), axis=0)
    bits = np.unpackbits(held.view(np.uint8), bitorder="little")
    _require((owner[np.flatnonzero(bits[: len(owner)])] != -1).all(), "a holder is nobody known")
    _require(not bits[len(owner) :].any(), "a holder is nobody known")
