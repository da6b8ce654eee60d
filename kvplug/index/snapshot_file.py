"""A snapshot file: flat arrays and settings, written whole or not at all, read whole or refused.

In:  a path, arrays of numbers by name, settings as JSON.   Out: the same, from a file or from the
bytes of one.

    preamble   32 bytes: magic, byte order, version, size and checksum of the header
    header     JSON: settings; name, dtype, length, offset and checksum of each array
    data       the arrays in the header's order, each from a multiple of 64 bytes on

docs/snapshot-format.md has every byte. Each bit is covered: by a checksum, or by a comparison with
what it must be. The checksums find accidents; they are no signature against forgery.
"""

from __future__ import annotations

import fcntl
import glob
import os
import re
import stat
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import IO, Annotated, Any, NamedTuple, Protocol, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from kvplug._version import __version__
from kvplug.errors import SnapshotError

JSON: TypeAlias = "bool | int | float | str | list[JSON] | dict[str, JSON] | None"
Array: TypeAlias = npt.NDArray[Any]

_Size = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]

MAJOR, MINOR = 1, 0

# As with PNG: no text begins like this, and a transfer that rewrites line ends destroys it.
_MAGIC = b"\x89KVP\r\n\x1a\n"
_BYTE_ORDER = b"\x04\x03\x02\x01"  # the number 0x01020304, lowest byte first
_PREAMBLE = struct.Struct("<8s4sHHQQ")
_CHECKSUM_AT = 24  # the preamble's last field covers everything before it, and the header
_ALIGNMENT = 64
_MAX_HEADER_END = 2**20
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,127}", re.ASCII)
_DTYPES = {
    name: np.dtype(name).newbyteorder("<")
    for name in ("uint8", "uint32", "int32", "int64", "uint64", "float64")
}


@dataclass(frozen=True, slots=True)
class SnapshotFile:
    """What a file held; the arrays are writable and belong to the caller."""

    settings: dict[str, JSON]
    arrays: dict[str, Array]
    kvplug_version: str  # that wrote it
    format_version: tuple[int, int]


class _Entry(msgspec.Struct, frozen=True):
    name: str
    dtype: str
    length: _Size
    offset: _Size  # in bytes, from the end of the header
    xxh3_64: str

    @property
    def nbytes(self) -> int:
        return self.length * _DTYPES[self.dtype].itemsize


class _Header(msgspec.Struct, frozen=True):
    kvplug: str
    settings: dict[str, Any]
    arrays: list[_Entry]


class _Preamble(NamedTuple):
    magic: bytes
    byte_order: bytes
    major: int
    minor: int
    header_nbytes: int
    checksum: int


_header_decoder = msgspec.json.Decoder(_Header)


def write(path: Path, arrays: Mapping[str, Array], settings: Mapping[str, JSON]) -> None:
    """Replace the file, or leave it as it was and raise SnapshotError.

    Nobody may change the arrays meanwhile.
    """
    try:
        flat = {name: _flat(name, array) for name, array in arrays.items()}
        head = _head(_entries(flat), settings)
        with _replacing(path) as file:
            file.write(head)
            for array in flat.values():
                file.write(_bytes_of(array))
                file.write(bytes(_num_padding(array.nbytes)))
    except (OSError, MemoryError, SnapshotError) as error:
        raise SnapshotError(f"cannot write the snapshot {path}: {error}") from error


def read(path: Path) -> SnapshotFile:
    """Settings and arrays of a file whose every bit is right; any other is a SnapshotError."""
    try:
        with open(path, "rb", opener=_open_without_waiting) as file:
            return _read(file, _size_of(file))
    except (OSError, MemoryError, SnapshotError) as error:
        raise SnapshotError(f"cannot read the snapshot {path}: {error}") from error


class FileBytes:
    """The bytes of a file, of arrays as they are now: they may change once this is made."""

    def __init__(self, arrays: Mapping[str, Array], settings: Mapping[str, JSON]) -> None:
        """SnapshotError for what no file can have."""
        flat = {name: _flat(name, array) for name, array in arrays.items()}
        self._settings = dict(settings)
        head = _head(_entries(flat, _no_checksum), settings)
        self._data_at = len(head)
        size = len(head) + sum(each.nbytes + _num_padding(each.nbytes) for each in flat.values())
        self._bytes = np.empty(size, dtype=np.uint8)
        self._arrays: dict[str, Array] = {}
        at = len(head)
        for name, array in flat.items():
            end = at + array.nbytes
            copy = self._bytes[at:end].view(array.dtype)
            copy[:] = array
            at = end + _num_padding(array.nbytes)
            self._bytes[end:at] = 0
            self._arrays[name] = copy

    def encode(self) -> memoryview:
        """All of the file; its checksums are computed now."""
        head = _head(_entries(self._arrays), self._settings)
        self._bytes[: self._data_at] = np.frombuffer(head, dtype=np.uint8)
        return self._bytes.data


def decode(data: bytes | bytearray | memoryview) -> SnapshotFile:
    """As `read`, of the bytes of a file."""
    try:
        return _read(_Bytes(memoryview(data)), len(data))
    except (MemoryError, SnapshotError) as error:
        raise SnapshotError(f"cannot read the snapshot: {error}") from error


class _Bytes:
    """What `_read` uses of a file; io.BytesIO would copy all first."""

    def __init__(self, data: memoryview) -> None:
        self._data, self._at = data, 0

    def tell(self) -> int:
        return self._at

    def read(self, size: int) -> bytes:
        part = bytes(self._data[self._at : self._at + size])
        self._at += len(part)
        return part

    def readinto(self, into: memoryview) -> int:
        part = self._data[self._at : self._at + into.nbytes]
        into[: part.nbytes] = part
        self._at += part.nbytes
        return part.nbytes


class _Readable(Protocol):
    def tell(self) -> int: ...
    def read(self, size: int, /) -> bytes: ...
    def readinto(self, into: memoryview, /) -> int: ...


def _flat(name: str, array: Array) -> Array:
    """The array as it lies in the file; a copy only if it is not like that already."""
    _check_name(name)
    if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.name not in _DTYPES:
        kind = f"{array.dtype}{list(array.shape)}" if hasattr(array, "dtype") else type(array)
        raise SnapshotError(f"{name!r} must be a 1-D array of {', '.join(_DTYPES)}, got {kind}")
    return np.ascontiguousarray(array, dtype=_DTYPES[array.dtype.name])


def _head(entries: list[_Entry], settings: Mapping[str, JSON]) -> bytes:
    """Preamble and header."""
    header = _encoded(_Header(__version__, _checked(settings), entries))
    end = _PREAMBLE.size + len(header)
    if end > _MAX_HEADER_END:
        raise SnapshotError(
            f"settings and names of arrays may take {_MAX_HEADER_END} bytes, got {end}"
        )
    fields = (_MAGIC, _BYTE_ORDER, MAJOR, MINOR, len(header))
    unsigned = _PREAMBLE.pack(*fields, 0)[:_CHECKSUM_AT]
    return _PREAMBLE.pack(*fields, xxhash.xxh3_64_intdigest(unsigned + header)) + header


def _encoded(header: _Header) -> bytes:
    """With blanks behind, so that the data begins aligned."""
    encoded = msgspec.json.encode(header)
    return encoded + b" " * _num_padding(_PREAMBLE.size + len(encoded))


def _checksum_of(array: Array) -> str:
    return xxhash.xxh3_64_hexdigest(_bytes_of(array))


def _no_checksum(_array: Array) -> str:
    """As long as one."""
    return "0" * 16


def _entries(
    arrays: Mapping[str, Array], checksum_of: Callable[[Array], str] = _checksum_of
) -> list[_Entry]:
    entries, offset = [], 0
    for name, array in arrays.items():
        entries.append(_Entry(name, array.dtype.name, len(array), offset, checksum_of(array)))
        offset += array.nbytes + _num_padding(array.nbytes)
    return entries


def _checked(settings: Mapping[str, JSON]) -> dict[str, JSON]:
    """The settings, if they come out of JSON as they went in: NaN, tuples and bytes would not."""
    try:
        kept = msgspec.json.decode(msgspec.json.encode(dict(settings)))
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise SnapshotError(f"settings must be plain JSON, got {error}") from error
    if lost := [name for name in settings if name not in kept or kept[name] != settings[name]]:
        raise SnapshotError(f"settings must be plain JSON, got other values for {lost}")
    return dict(settings)


@contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file beside, of mode 0600, that takes the path once all of it is on the disk."""
    _remove_abandoned(path)
    file = tempfile.NamedTemporaryFile(  # noqa: SIM115 - outlives its own with
        dir=path.parent, prefix=f".{path.name}.", suffix=".tmp", delete=False
    )
    try:
        with file:
            with suppress(OSError):  # a disk without locks: nothing is ever taken for abandoned
                fcntl.flock(file, fcntl.LOCK_EX)
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(file.name)
        raise
    _sync_folder(path.parent)


def _remove_abandoned(path: Path) -> None:
    """What killed writers of this path left: unlike those at work, they hold no lock."""
    for abandoned in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        with suppress(OSError), open(abandoned, "rb", opener=_open_without_waiting) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            abandoned.unlink()


def _sync_folder(folder: Path) -> None:
    """Without it the new name may be lost with the power."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _open_without_waiting(path: str, flags: int) -> int:
    """A named pipe is refused by _size_of, not waited for."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def _read(file: _Readable, file_nbytes: int) -> SnapshotFile:
    preamble, header = _read_head(file)
    _check_layout(header.arrays, file_nbytes - file.tell())
    arrays = {entry.name: _read_array(file, entry) for entry in header.arrays}
    version = (preamble.major, preamble.minor)
    return SnapshotFile(header.settings, arrays, header.kvplug, version)


def _size_of(file: BufferedReader) -> int:
    status = os.fstat(file.fileno())
    if not stat.S_ISREG(status.st_mode):
        raise SnapshotError("expected a regular file, got a pipe, a socket or a device")
    return status.st_size


def _read_head(file: _Readable) -> tuple[_Preamble, _Header]:
    """Nothing in the header is looked at before its checksum is right."""
    raw = file.read(_PREAMBLE.size)
    preamble = _parse_preamble(raw)
    header = file.read(preamble.header_nbytes)
    if len(header) != preamble.header_nbytes:
        raise SnapshotError(
            f"expected a header of {preamble.header_nbytes} bytes, got {len(header)}, then the end"
        )
    checksum = xxhash.xxh3_64_intdigest(raw[:_CHECKSUM_AT] + header)
    if checksum != preamble.checksum:
        raise SnapshotError(
            f"its header is damaged: expected checksum {preamble.checksum:016x}, "
            f"got {checksum:016x}"
        )
    return preamble, _parse_header(header)


def _parse_preamble(raw: bytes) -> _Preamble:
    if raw[: len(_MAGIC)] != _MAGIC[: len(raw)] or not raw:
        raise SnapshotError(f"expected a kvplug snapshot, got a file that begins with {raw[:8]!r}")
    if len(raw) < _PREAMBLE.size:
        raise SnapshotError(f"expected {_PREAMBLE.size} bytes and more, the file has {len(raw)}")
    preamble = _Preamble(*_PREAMBLE.unpack(raw))
    _check_preamble(preamble)
    return preamble


def _check_preamble(preamble: _Preamble) -> None:
    if preamble.byte_order != _BYTE_ORDER:
        raise SnapshotError(
            f"expected the byte order {_BYTE_ORDER.hex()} (little-endian), "
            f"got {preamble.byte_order.hex()}"
        )
    if preamble.major != MAJOR:
        age = "newer" if preamble.major > MAJOR else "unknown"
        raise SnapshotError(
            f"expected format {MAJOR}.x, got the {age} format {preamble.major}.{preamble.minor}"
        )
    end = _PREAMBLE.size + preamble.header_nbytes
    if end > _MAX_HEADER_END or end % _ALIGNMENT:
        raise SnapshotError(
            f"expected a header that ends at a multiple of {_ALIGNMENT} "
            f"up to {_MAX_HEADER_END}, got {end}"
        )


def _parse_header(raw: bytes) -> _Header:
    try:
        return _header_decoder.decode(raw)
    except (ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise SnapshotError(f"expected a header of format {MAJOR}.x, got {error}") from error


def _check_layout(entries: list[_Entry], data_nbytes: int) -> None:
    """The arrays lie one behind the other and fill the file: nothing is allocated before this."""
    names: set[str] = set()
    end = 0
    for entry in entries:
        _check_entry(entry, names, end)
        names.add(entry.name)
        end += entry.nbytes + _num_padding(entry.nbytes)
    if end != data_nbytes:
        raise SnapshotError(f"expected {end} bytes of arrays, the file has {data_nbytes}")


def _check_entry(entry: _Entry, names_before: set[str], offset: int) -> None:
    _check_name(entry.name)
    if entry.name in names_before:
        raise SnapshotError(f"expected each array once, got {entry.name!r} twice")
    if entry.dtype not in _DTYPES:
        raise SnapshotError(
            f"{entry.name!r} must be of {', '.join(_DTYPES)}, got dtype {entry.dtype[:40]!r}"
        )
    if entry.offset != offset:
        raise SnapshotError(f"expected {entry.name!r} at offset {offset}, got {entry.offset}")


def _check_name(name: str) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise SnapshotError(
            f"an array's name must be a letter or _ and up to 127 of A-Z a-z 0-9 _ . -, "
            f"got {str(name)[:140]!r}"
        )


def _read_array(file: _Readable, entry: _Entry) -> Array:
    array = np.empty(entry.length, dtype=_DTYPES[entry.dtype])
    num_read = file.readinto(_bytes_of(array))
    if num_read != array.nbytes:
        raise SnapshotError(f"{entry.name!r}: expected {array.nbytes} bytes, got {num_read}")
    if (checksum := _checksum_of(array)) != entry.xxh3_64:
        raise SnapshotError(
            f"{entry.name!r} is damaged: expected checksum {entry.xxh3_64[:16]!r}, got {checksum!r}"
        )
    padding = bytes(_num_padding(array.nbytes))
    if file.read(len(padding)) != padding:
        raise SnapshotError(f"expected zeros behind {entry.name!r}, got something else")
    return array.astype(np.dtype(entry.dtype), copy=False)


def _bytes_of(array: Array) -> memoryview:
    """The array's own memory."""
    return array.view(np.uint8).data


def _num_padding(nbytes: int) -> int:
    return -nbytes % _ALIGNMENT
