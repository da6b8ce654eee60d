"""A folder of arrays in memory that several processes map.

In:  names and sizes.   Out: arrays of uint64, which others open by name.

The files are in /dev/shm where the system has it, and belong to one user. Memory is taken when a
file is made, so that a folder that is full raises at once, and not later where it is first touched.
An array stays as long as any process maps it, though its file is removed; what a process maps goes
with the process.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from kvplug.errors import SharedMemoryError

U64 = npt.NDArray[np.uint64]

_PREFIX: Final = "kvplug-"
_LOCK: Final = "owner.lock"
_IN_MEMORY: Final = Path("/dev/shm")


class SharedFolder:
    """create, open, remove arrays; write, read small files."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def create(self, name: str, num_words: int) -> U64:
        """uint64[num_words] of zeros, which this process writes; SharedMemoryError if there is no
        memory left for it.
        """
        try:
            with (self.path / name).open("x+b") as file:  # nobody maps another one of this name
                _take(file.fileno(), 8 * num_words)
                return _mapped(file.fileno(), writes=True)
        except OSError as error:
            size, where = f"{8 * num_words / 2**20:.1f} MiB", f"{self.path.parent}"
            raise SharedMemoryError(
                f"cannot make a shared array of {size} in {where}: {error.strerror}; give it more "
                "memory (Docker: --shm-size)"
            ) from error

    def open(self, name: str, *, writes: bool = False) -> U64:
        """An array that some process made; FileNotFoundError if it is gone."""
        with (self.path / name).open("r+b" if writes else "rb") as file:
            return _mapped(file.fileno(), writes=writes)

    def write(self, name: str, content: bytes) -> None:
        """A small file, there as a whole or not at all."""
        part = self.path / f"{name}.part"
        part.write_bytes(content)
        part.replace(self.path / name)

    def read(self, name: str) -> bytes:
        """FileNotFoundError if it is gone."""
        return (self.path / name).read_bytes()

    def remove(self, name: str) -> None:
        """Who maps it keeps it."""
        with contextlib.suppress(FileNotFoundError):
            (self.path / name).unlink()

    def lock(self, name: str) -> int | None:
        """A descriptor that holds a lock until it is closed or its process ends; None if another
        process holds it.
        """
        descriptor = os.open(self.path / name, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return None
        return descriptor


class OwnedFolder(SharedFolder):
    """A new folder, removed by `close`. What a killed owner has left is removed with the next."""

    def __init__(self, parent: Path | None = None) -> None:
        parent = parent or (_IN_MEMORY if _IN_MEMORY.is_dir() else Path(tempfile.gettempdir()))
        _remove_left(parent)
        super().__init__(Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent)))
        self._lock = self.lock(_LOCK)

    def close(self) -> None:
        """Remove it with all files."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.unlock()

    def unlock(self) -> None:
        """Leave it to who comes next."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _remove_left(parent: Path) -> None:
    for path in parent.glob(f"{_PREFIX}*"):
        if not (path / _LOCK).is_file() or path.stat().st_uid != os.getuid():
            continue
        descriptor = SharedFolder(path).lock(_LOCK)
        if descriptor is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(descriptor)


def _take(descriptor: int, num_bytes: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, num_bytes)
    else:
        os.ftruncate(descriptor, num_bytes)


def _mapped(descriptor: int, *, writes: bool) -> U64:
    access = mmap.ACCESS_WRITE if writes else mmap.ACCESS_READ
    return np.frombuffer(mmap.mmap(descriptor, 0, access=access), dtype=np.uint64)
