"""SavedFleet: what a Router knows of blocks, to a file or to bytes, and back.

In:  the indexes of a fleet.   Out: a file of one index, bytes of all of them
(docs/snapshot-format.md); equal indexes from either.

Requests are routed meanwhile, events wait.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from kvplug.errors import ConfigError, SnapshotError
from kvplug.events import Rank
from kvplug.index import snapshot
from kvplug.index.snapshot import Snapshot
from kvplug.index.snapshot_file import JSON, FileBytes, SnapshotFile
from kvplug.router.followed_fleet import FollowedFleet
from kvplug.router.index_group import SavedGroup

Arrays = Mapping[str, npt.NDArray[Any]]

_WORKERS: Final = "workers"
_SETTINGS: Final = "settings"


class SavedWorker(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a fleet knows of a worker besides its blocks; recomputed: by rank, where it is not 0."""

    cxl_pools: tuple[int, ...] = ()
    recomputed: tuple[tuple[int, int], ...] = ()


class SavedFleet(FollowedFleet):
    """save_index, load_index; freeze_indexes, restore_indexes."""

    def save_index(self, path: str | Path) -> None:
        """Write the index to a file (kvplug/index/snapshot.py); requests are routed meanwhile,
        events wait.

        SnapshotError if that cannot be, and a former file stays; ConfigError for a fleet with
        several indexes.
        """
        with self._lock.low_priority as turn:
            saved = Snapshot(self.index)
            with turn.released():
                saved.write(Path(path))

    def load_index(self, path: str | Path) -> list[str]:
        """Begin with the blocks of a file that `save_index` wrote; returns the workers in it that
        are not in the fleet, whose blocks are left out: add workers first.

        What a rank holds may have changed since: its blocks count with its confidence as before,
        so set that, or follow an engine that can replay, which corrects them. SnapshotError for a
        file that is none; ConfigError, and nothing done, for a router that has blocks or several
        indexes, or one with other block sizes.
        """
        self._require_following("load an index")
        index = snapshot.restore(Path(path), **self.fleet_index.index_options)
        with self._lock.low_priority:
            self.fleet_index.require_fitting(index.block_size)
            left_out = self.fleet_index.take_over([SavedGroup("", index)])
            self._fleet_changed()
        return sorted({rank.worker for rank in left_out})

    def freeze_indexes(self, settings: Mapping[str, JSON], more: Arrays) -> FileBytes:
        """All indexes as they are now, copied, with these settings and further arrays in one file.

        Call it where events are applied, if `more` is to be of the same moment.
        """
        with self._lock.low_priority as turn:
            groups = self.fleet_index.groups
            models, saved = [group.model for group in groups], [Snapshot(g.index) for g in groups]
            workers = {name: self._saved_worker(name) for name in self.fleet_index.members}
            with turn.released():
                arrays = dict(more) | {_WORKERS: as_array(workers)}
                for number, each in enumerate(saved):
                    arrays[_name(number, _SETTINGS)] = np.frombuffer(each.settings, np.uint8)
                    for name, array in each.arrays.items():
                        arrays[_name(number, name)] = array
                return FileBytes(arrays, {**settings, "models": list[JSON](models)})

    def restore_indexes(self, file: SnapshotFile, ranks: Collection[Rank]) -> set[Rank]:
        """Begin with the blocks that a fleet froze, but only those of `ranks`; returns of which
        ranks: add workers first, as others are left out, and those that have another model or
        block size now.

        SnapshotError, and nothing done, for a file that has no sound indexes; ConfigError for a
        router that has blocks, or does not go by events.
        """
        self._require_following("restore a fleet")
        workers = _workers_of(file)
        saved = [self._restored(file, number, model) for number, model in _models_of(file)]
        worth = _worth_of(saved)
        for each in saved:
            _keep(each, ranks)
        with self._lock.low_priority:
            self.fleet_index.require_empty("cannot restore a fleet")
            for name in workers.keys() & self.fleet_index.members.keys():
                self._restore_worker(name, workers[name])
            left_out = set(self.fleet_index.take_over(saved))
            taken = worth.keys() & set(ranks) - left_out
            for rank in taken:
                self.fleet_index.set_confidence(rank, worth[rank])
            self._fleet_changed()
        return taken

    def _require_following(self, attempt: str) -> None:
        if not self.config.follows_events:
            raise ConfigError(
                f"cannot {attempt}: expected a router that goes by events, this one does not"
            )

    def _saved_worker(self, name: str) -> SavedWorker:
        member, fleet_index = self.fleet_index.members[name], self.fleet_index
        counts = [(rank.dp_rank, fleet_index.num_recomputed(rank)) for rank in member.ranks]
        recomputed = tuple((dp_rank, count) for dp_rank, count in counts if count)
        return SavedWorker(tuple(sorted(member.cxl_pools)), recomputed)

    def _restored(self, file: SnapshotFile, number: int, model: str) -> SavedGroup:
        prefix = _name(number, "")
        arrays = {
            name.removeprefix(prefix): array
            for name, array in file.arrays.items()
            if name.startswith(prefix)
        }
        settings = from_array(arrays.pop(_SETTINGS, None), dict[str, Any])
        part = SnapshotFile(settings, arrays, file.kvplug_version, file.format_version)
        return SavedGroup(model, snapshot.restored(part, **self.fleet_index.index_options))

    def _restore_worker(self, name: str, saved: SavedWorker) -> None:
        """What nobody has said yet."""
        if saved.cxl_pools and not self.fleet_index.members[name].cxl_pools:
            self.fleet_index.set_cxl_pools(name, saved.cxl_pools)
        for dp_rank, num_blocks in saved.recomputed:
            self.fleet_index.set_recomputed(Rank(name, dp_rank), num_blocks)


def _name(number: int, array: str) -> str:
    """Of an array of an index, in a file of several; an index has no `-` in its own names."""
    return f"index{number}-{array}"


def as_array(value: object) -> npt.NDArray[np.uint8]:
    """As JSON: settings in the header of a file are limited in size, arrays are not."""
    return np.frombuffer(msgspec.json.encode(value), dtype=np.uint8)


def from_array(array: npt.NDArray[Any] | None, type_: Any) -> Any:  # noqa: ANN401 - as msgspec
    """What `as_array` was given; SnapshotError for anything else."""
    if array is None or array.dtype != np.uint8:
        raise SnapshotError("an array of JSON is missing")
    try:
        return msgspec.json.decode(array.tobytes(), type=type_)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise SnapshotError(f"an array of JSON is damaged: {error}") from error


def _workers_of(file: SnapshotFile) -> dict[str, SavedWorker]:
    workers: dict[str, SavedWorker] = from_array(file.arrays.get(_WORKERS), dict[str, SavedWorker])
    return workers


def _models_of(file: SnapshotFile) -> list[tuple[int, str]]:
    try:
        models = msgspec.convert(file.settings.get("models"), list[str])
    except msgspec.ValidationError as error:
        raise SnapshotError(f"expected the models of its indexes, got {error}") from error
    return list(enumerate(models))


def _worth_of(saved: list[SavedGroup]) -> dict[Rank, float]:
    """What the blocks of each rank count for."""
    return {
        rank: confidence
        for each in saved
        for rank, confidence in zip(
            each.index.numbers.ranks, each.index.confidence.tolist(), strict=True
        )
        if rank is not None
    }


def _keep(saved: SavedGroup, ranks: Collection[Rank]) -> None:
    for rank in list(saved.index.numbers.ranks):
        if rank is not None and rank not in ranks:
            saved.index.remove_rank(rank)
