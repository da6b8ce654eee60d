import json
import os
import re
import resource
import signal
import stat
import struct
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as numpy_st

from kvplug import __version__
from kvplug.errors import KvplugError, SnapshotError
from kvplug.index import snapshot_file

DOCS = Path(__file__).parents[2] / "docs" / "snapshot-format.md"
DTYPES = ("uint8", "uint32", "int32", "int64", "uint64", "float64")

names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.-]{0,127}", fullmatch=True)
arrays_of_any_kind = st.sampled_from(DTYPES).flatmap(
    lambda dtype: numpy_st.arrays(dtype, st.integers(0, 200))
)
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    # Surrogates are no text: JSON in UTF-8 has no way to write them.
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner) | st.dictionaries(st.text("abc"), inner),
    max_leaves=8,
)
contents = st.dictionaries(names, arrays_of_any_kind, max_size=5)
settings_of_any_kind = st.dictionaries(st.text("abc ü\n"), json_values, max_size=4)


def small():
    return {
        "hashes": np.array([1, 2**64 - 1, 3], dtype=np.uint64),
        "flags": np.array([0, 1, 255], dtype=np.uint8),
    }


@pytest.fixture
def path(tmp_path):
    return tmp_path / "index.kvplug"


@pytest.fixture
def image(path):
    """The bytes of a small file."""
    snapshot_file.write(path, small(), {"block_size": 16})
    return path.read_bytes()


def reason_for(path, image):
    """Why these bytes are refused."""
    path.write_bytes(image)
    with pytest.raises(SnapshotError) as caught:
        snapshot_file.read(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def forged(header, data=b"", *, major=1, minor=0, byte_order=0x01020304, header_nbytes=None):
    """A file with right checksums and any header, written after the document, not the code."""
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    header += b" " * (-(32 + len(header)) % 64)
    size = len(header) if header_nbytes is None else header_nbytes
    head = b"\x89KVP\r\n\x1a\n" + struct.pack("<IHHQ", byte_order, major, minor, size)
    return head + struct.pack("<Q", xxhash.xxh3_64_intdigest(head + header)) + header + data


def entry(name="a", dtype="uint8", length=0, offset=0, data=b""):
    checksum = xxhash.xxh3_64_hexdigest(data)
    return {"name": name, "dtype": dtype, "length": length, "offset": offset, "xxh3_64": checksum}


def header(*entries, **more):
    return {"kvplug": "9.9.9", "settings": {}, "arrays": list(entries), **more}


@given(arrays=contents, settings=settings_of_any_kind)
def test_what_is_written_is_read(tmp_path_factory, arrays, settings):
    path = tmp_path_factory.mktemp("snapshot") / "index.kvplug"
    snapshot_file.write(path, arrays, settings)
    found = snapshot_file.read(path)
    # As text too: True is 1 and 1.0 in Python, but not in JSON.
    assert found.settings == settings
    assert json.dumps(found.settings) == json.dumps(settings)
    assert list(found.arrays) == list(arrays)
    for name, array in arrays.items():
        assert found.arrays[name].dtype == array.dtype
        assert found.arrays[name].tobytes() == array.tobytes()
        assert found.arrays[name].flags.writeable
        assert found.arrays[name].flags.owndata


def test_a_file_says_who_wrote_it(path, image):
    found = snapshot_file.read(path)
    assert found.kvplug_version == __version__
    assert found.format_version == (1, 0)


def test_nothing_at_all_is_a_snapshot_too(path):
    snapshot_file.write(path, {}, {})
    found = snapshot_file.read(path)
    assert (found.arrays, found.settings) == ({}, {})


def test_arrays_begin_at_multiples_of_64_bytes(path, image):
    assert len(image) % 64 == 0
    hashes, flags = (small()[name].tobytes() for name in ("hashes", "flags"))
    assert image.index(hashes) % 64 == 0
    assert image.index(flags, image.index(hashes) + len(hashes)) % 64 == 0


def test_strided_and_big_endian_arrays_keep_their_values(path):
    numbers = np.arange(10, dtype=np.int64)
    arrays = {"strided": numbers[::-3], "swapped": numbers.astype(">i8")}
    snapshot_file.write(path, arrays, {})
    found = snapshot_file.read(path).arrays
    for name, array in arrays.items():
        assert found[name].tolist() == array.tolist()
        assert found[name].dtype == np.int64


def test_only_the_owner_may_read_the_file(path, image):
    path.chmod(0o644)
    snapshot_file.write(path, small(), {})
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_file_cut_off_at_any_byte_is_rejected(path, image):
    for size in range(len(image)):
        reason_for(path, image[:size])


def test_a_file_with_more_behind_is_rejected(path, image):
    assert "bytes of arrays, the file has" in reason_for(path, image + b"\0")
    assert "bytes of arrays, the file has" in reason_for(path, image + bytes(64))


def test_any_flipped_bit_is_found(path, image):
    path.write_bytes(image)
    with path.open("r+b", buffering=0) as file:
        for bit in range(8 * len(image)):
            at = bit // 8
            os.pwrite(file.fileno(), bytes([image[at] ^ 1 << bit % 8]), at)
            with pytest.raises(SnapshotError, match=re.escape(str(path))):
                snapshot_file.read(path)
            os.pwrite(file.fileno(), image[at : at + 1], at)
    snapshot_file.read(path)


def test_what_is_damaged_is_named(path, image):
    at = image.index(small()["hashes"].tobytes())
    assert "'hashes' is damaged" in reason_for(path, image[:at] + b"\7" + image[at + 1 :])
    assert "header is damaged" in reason_for(path, image[:40] + b"\7" + image[41:])
    assert "zeros behind 'flags'" in reason_for(path, image[:-1] + b"\7")


def test_a_newer_minor_version_is_read(path):
    new = {**entry("a", "uint8", 3, data=b"xyz"), "unit": "letters"}
    path.write_bytes(forged(header(new, cluster="blue"), b"xyz" + bytes(61), minor=7))
    found = snapshot_file.read(path)
    assert found.arrays["a"].tobytes() == b"xyz"
    assert found.kvplug_version == "9.9.9"
    assert found.format_version == (1, 7)


def test_a_newer_major_version_is_rejected_by_name(path):
    assert "expected format 1.x, got the newer format 2.3" in reason_for(
        path, forged(b"of any form", major=2, minor=3)
    )
    assert "the unknown format 0.9" in reason_for(path, forged(header(), major=0, minor=9))


def test_other_byte_orders_are_rejected(path):
    for byte_order in (0x04030201, 0x02010403, 0):
        reason = reason_for(path, forged(header(), byte_order=byte_order))
        assert "expected the byte order 04030201 (little-endian)" in reason


@pytest.mark.parametrize(
    "image", [b"", b"hello, I am text\n" * 10, b"\x89PNG\r\n\x1a\n" + bytes(100), bytes(4096)]
)
def test_foreign_files_are_rejected(path, image):
    reason = reason_for(path, image)
    assert "expected a kvplug snapshot" in reason
    assert repr(image[:8]) in reason


@pytest.mark.parametrize("nbytes", [2**20, 2**40, 2**64 - 32, 2**64 - 1, 0, 33])
def test_absurd_sizes_of_the_header_are_rejected(path, nbytes):
    reason_for(path, forged(header(), header_nbytes=nbytes))


@pytest.mark.parametrize("length", [-1, 1, 2**40, 2**61, 2**63, 2**200, 10**4000, 1.5, "3"])
def test_absurd_lengths_are_rejected(path, length):
    reason_for(path, forged(header(entry(dtype="uint64", length=length))))


odd_values = st.one_of(
    st.text(max_size=3), st.sampled_from(["a", "b", "uint8", "uint64"]), st.integers(), st.none()
)
odd_entries = st.fixed_dictionaries(
    {
        "name": st.sampled_from("abc") | odd_values,
        "dtype": st.sampled_from(DTYPES) | odd_values,
        "length": st.integers(0, 3) | odd_values,
        "offset": st.sampled_from([0, 64, 128]) | odd_values,
    },
    optional={"xxh3_64": st.just(xxhash.xxh3_64_hexdigest(b"")) | odd_values},
)


@given(entries=st.lists(odd_entries, max_size=3), data=st.binary(max_size=3), settings=odd_values)
def test_headers_with_right_checksums_are_read_or_rejected(
    tmp_path_factory, entries, data, settings
):
    path = tmp_path_factory.mktemp("snapshot") / "index.kvplug"
    path.write_bytes(forged(header(*entries, settings={"a": settings}), data.ljust(64, b"\0")))
    with suppress(SnapshotError):
        snapshot_file.read(path)


@pytest.mark.parametrize("offset", [-64, 64, 1, 2**64])
def test_arrays_elsewhere_than_behind_each_other_are_rejected(path, offset):
    reason_for(
        path, forged(header(entry("a", length=1, offset=offset, data=b"x")), b"x" + bytes(63))
    )


def test_arrays_that_share_bytes_are_rejected(path):
    both = [entry("a", length=1, data=b"x"), entry("b", length=1, data=b"x")]
    assert "expected 'b' at offset 64, got 0" in reason_for(
        path, forged(header(*both), b"x" + bytes(63))
    )


def test_a_name_twice_is_rejected(path):
    assert "expected each array once, got 'a' twice" in reason_for(
        path, forged(header(entry("a"), entry("a")))
    )


@pytest.mark.parametrize("name", ["", "../a", "a/b", "a b", "a\0", "a\n", "1a", "ä", "a" * 129, 7])
def test_unsafe_names_are_rejected_both_ways(path, name):
    reason_for(path, forged(header(entry(name))))
    path.unlink()
    with pytest.raises(SnapshotError, match="name must be"):
        snapshot_file.write(path, {name: np.zeros(1, np.uint8)}, {})


@pytest.mark.parametrize("dtype", ["object", "uint16", "<u8", "O", "bool", ""])
def test_unknown_dtypes_are_rejected(path, dtype):
    assert f"got dtype {dtype!r}" in reason_for(path, forged(header(entry(dtype=dtype))))


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b"{",
        b"\xff",
        b'{"kvplug": "1", "arrays": []}',
        b'{"kvplug": "1", "arrays": [], "settings": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
    ids=["nothing", "list", "cut off", "no text", "no settings", "deep"],
)
def test_other_headers_are_rejected(path, raw):
    assert "expected a header of format 1.x" in reason_for(path, forged(raw))


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((2, 2), np.uint64),
        np.zeros((), np.uint64),
        np.array(["text"]),
        np.array([object()]),
        np.zeros(1, np.float32),
        np.zeros(1, np.bool_),
        np.zeros(1, np.dtype([("a", "u8")])),
        [1, 2],
        b"bytes",
        None,
    ],
    ids=str,
)
def test_other_arrays_are_not_written(path, array):
    with pytest.raises(SnapshotError, match=r"'a' must be a 1-D array of uint8, .*, got "):
        snapshot_file.write(path, {"a": array}, {})
    assert not path.exists()


@pytest.mark.parametrize(
    "value",
    [float("nan"), float("inf"), [float("nan")], (1, 2), b"x", {1: 2}, {"a"}, object(), "\ud800"],
    ids=repr,
)
def test_settings_that_json_would_change_are_not_written(path, value):
    with pytest.raises(SnapshotError, match="settings must be plain JSON"):
        snapshot_file.write(path, {}, {"a": value})
    assert not path.exists()


def test_settings_beyond_the_header_are_not_written(path):
    with pytest.raises(SnapshotError, match="may take 1048576 bytes, got 2"):
        snapshot_file.write(path, {}, {"a": "x" * 2_000_000})
    snapshot_file.write(path, {}, {"a": "x" * 1_000_000})
    assert len(snapshot_file.read(path).settings["a"]) == 1_000_000


@pytest.fixture
def full_disk():
    """Files of this process may have 100000 bytes: a write beyond fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(path, image, full_disk):
    large = {"first": np.ones(10, np.uint64), "second": np.ones(1_000_000, np.uint64)}
    with pytest.raises(SnapshotError, match="cannot write the snapshot") as caught:
        snapshot_file.write(path, large, {})
    assert isinstance(caught.value.__cause__, OSError)
    assert path.read_bytes() == image
    assert os.listdir(path.parent) == [path.name]


def test_a_write_that_cannot_be_put_in_place_leaves_nothing(tmp_path):
    folder = tmp_path / "a folder"
    folder.mkdir()
    with pytest.raises(SnapshotError, match="Is a directory"):
        snapshot_file.write(folder, small(), {})
    assert os.listdir(tmp_path) == [folder.name]


def test_a_process_that_dies_while_writing_leaves_the_old_file(path, image):
    program = f"""
import os, pathlib, signal
from kvplug.index import snapshot_file
with snapshot_file._replacing(pathlib.Path({str(path)!r})) as file:
    file.write(b"half")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""
    died = subprocess.run([sys.executable, "-c", program])
    assert died.returncode == -signal.SIGKILL
    assert path.read_bytes() == image
    assert len(os.listdir(path.parent)) == 2
    snapshot_file.write(path, {}, {"after": True})
    assert snapshot_file.read(path).settings == {"after": True}
    assert os.listdir(path.parent) == [path.name]


def test_two_writers_at_once_do_not_disturb_each_other(path, image):
    with snapshot_file._replacing(path) as file:
        snapshot_file.write(path, {}, {"writer": 2})
        assert snapshot_file.read(path).settings == {"writer": 2}
        file.write(image)
    assert path.read_bytes() == image
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize("folder", ["/proc", "nowhere", "index.kvplug"])
def test_folders_that_take_no_file_are_snapshot_errors(path, image, folder):
    with pytest.raises(SnapshotError, match="cannot write the snapshot"):
        snapshot_file.write(path.parent / folder / "other.kvplug", small(), {})


@pytest.fixture
def nobody():
    """Without an administrator's rights, who may write into read-only folders."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    yield
    os.seteuid(user)


@pytest.fixture
def read_only_folder(tmp_path):
    folder = tmp_path / "read-only"
    folder.mkdir(mode=0o555)
    return folder


def test_a_read_only_folder_is_a_snapshot_error(read_only_folder, nobody):
    with pytest.raises(SnapshotError, match=r"cannot write .*: .*Permission denied"):
        snapshot_file.write(read_only_folder / "index.kvplug", small(), {})


def test_what_is_no_file_is_a_snapshot_error(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, reason in [
        (tmp_path / "missing", "No such file"),
        (tmp_path, "Is a directory"),
        (tmp_path / "pipe", "expected a regular file"),
        (Path("/dev/zero"), "expected a regular file"),
    ]:
        with pytest.raises(SnapshotError, match=reason):
            snapshot_file.read(path)
    assert issubclass(SnapshotError, KvplugError)


def test_the_example_of_the_document_is_such_a_file(path):
    [dump] = re.findall(r"```hexdump\n(.*?)```", DOCS.read_text(), re.DOTALL)
    image = bytes.fromhex("".join(line[6:54] for line in dump.splitlines()))
    path.write_bytes(image)
    found = snapshot_file.read(path)
    assert found.settings == {"block_size": 16}
    assert found.arrays["hashes"].tolist() == [71, 72]
    assert f"checksum 0x{struct.unpack_from('<Q', image, 24)[0]:016x}" in DOCS.read_text()
    assert f"checksum 0x{xxhash.xxh3_64_hexdigest(image[0xC0:0xD0])}" in DOCS.read_text()
    snapshot_file.write(path, found.arrays, found.settings)
    if found.kvplug_version == __version__:
        assert path.read_bytes() == image
