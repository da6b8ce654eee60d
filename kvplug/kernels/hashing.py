"""Token ids to block hashes, block hashes to sequence hashes: XXH3-64.

In:  uint32 token ids.   Out: uint64, one hash per full block; the trailing partial block has none.

The algorithm is XXH3-64 with a seed (xxHash 0.8, doc/xxhash_spec.md of Cyan4973/xxHash) over the
little-endian bytes of the tokens, so input lengths are multiples of 4 bytes and every read of the
input is word-aligned. Offsets into the input count 4-byte words, offsets into the secret bytes.
They are unsigned: a signed index is asked for its sign on every read, which takes three times as
long. Reference: the xxhash package (tests/kernels/test_hashing.py).
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvplug.kernels._jit import (
    b1,
    fold_multiply,
    i8,
    inlined,
    inlined_allocating,
    kernel,
    reads,
    u4,
    u8,
    void,
    writes,
)

U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
Index = int | np.uint64

# The 192-byte default secret of XXH3 (xxhash.h, XXH3_kSecret).
_SECRET_BYTES = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
# _SECRET[o] is the little-endian u64 at byte offset o: short inputs read it unaligned.
_SECRET = np.array(
    [int.from_bytes(_SECRET_BYTES[o : o + 8], "little") for o in range(185)], dtype=np.uint64
)

_P32_1, _P32_2, _P32_3 = np.uint64(0x9E3779B1), np.uint64(0x85EBCA77), np.uint64(0xC2B2AE3D)
_P64_1, _P64_2 = np.uint64(0x9E3779B185EBCA87), np.uint64(0xC2B2AE3D27D4EB4F)
_P64_3, _P64_4 = np.uint64(0x165667B19E3779F9), np.uint64(0x85EBCA77C2B2AE63)
_P64_5 = np.uint64(0x27D4EB2F165667C5)
_AVALANCHE, _RRMXMX = np.uint64(0x165667919E3779F9), np.uint64(0x9FB21C651E98DF25)
_LOW32, _LOW8, _LOW16 = (
    np.uint64(0xFFFFFFFF),
    np.uint64(0x00FF00FF00FF00FF),
    np.uint64(0x0000FFFF0000FFFF),
)
_0, _1, _2, _3, _4, _7, _8 = (np.uint64(n) for n in (0, 1, 2, 3, 4, 7, 8))
_11, _15, _16, _17, _19, _24 = (np.uint64(n) for n in (11, 15, 16, 17, 19, 24))
_28, _32, _35, _37, _40, _47 = (np.uint64(n) for n in (28, 32, 35, 37, 40, 47))
_48, _49, _60, _64, _119, _121 = (np.uint64(n) for n in (48, 49, 60, 64, 119, 121))


@inlined
def _read(words: U32, at: np.uint64) -> np.uint64:
    """The little-endian u64 at word `at`. LLVM makes one load of it, as the index is unsigned."""
    return np.uint64(words[at]) | (np.uint64(words[at + _1]) << _32)


@inlined
def _avalanche(h: np.uint64) -> np.uint64:
    h ^= h >> _37
    h *= _AVALANCHE
    return h ^ (h >> _32)


@inlined
def _swap32(x: np.uint64) -> np.uint64:
    """Reverse the bytes of each 32-bit half."""
    x = ((x & _LOW8) << _8) | ((x >> _8) & _LOW8)
    return ((x & _LOW16) << _16) | ((x >> _16) & _LOW16)


@inlined
def _swap64(x: np.uint64) -> np.uint64:
    x = _swap32(x)
    return (x << _32) | (x >> _32)


@inlined
def _rotate(x: np.uint64, left: np.uint64) -> np.uint64:
    return (x << left) | (x >> (_64 - left))


@inlined
def _mix16(words: U32, at: np.uint64, secret_at: np.uint64, seed: np.uint64) -> np.uint64:
    low = _read(words, at) ^ (_SECRET[secret_at] + seed)
    high = _read(words, at + _2) ^ (_SECRET[secret_at + _8] - seed)
    return np.uint64(fold_multiply(low, high))


@inlined
def _hash_4_to_8(words: U32, at: np.uint64, n: np.uint64, seed: np.uint64) -> np.uint64:
    seed ^= _swap32(seed & _LOW32) << _32
    first, last = np.uint64(words[at]), np.uint64(words[at + n - _1])
    h = (last + (first << _32)) ^ ((_SECRET[_8] ^ _SECRET[_16]) - seed)
    h ^= _rotate(h, _49) ^ _rotate(h, _24)
    h *= _RRMXMX
    h ^= (h >> _35) + _4 * n
    h *= _RRMXMX
    return np.uint64(h ^ (h >> _28))


@inlined
def _hash_9_to_16(low: np.uint64, high: np.uint64, length: np.uint64, seed: np.uint64) -> np.uint64:
    low ^= (_SECRET[_24] ^ _SECRET[_32]) + seed
    high ^= (_SECRET[_40] ^ _SECRET[_48]) - seed
    return _avalanche(length + _swap64(low) + high + np.uint64(fold_multiply(low, high)))


@inlined
def _hash_17_to_128(words: U32, at: np.uint64, n: np.uint64, seed: np.uint64) -> np.uint64:
    acc = _4 * n * _P64_1
    for pair in range((n + _7) // _8):
        acc += _mix16(words, at + _4 * pair, _32 * pair, seed)
        acc += _mix16(words, at + n - _4 * (pair + _1), _32 * pair + _16, seed)
    return _avalanche(acc)


@inlined
def _hash_129_to_240(words: U32, at: np.uint64, n: np.uint64, seed: np.uint64) -> np.uint64:
    acc = _4 * n * _P64_1
    for i in range(_8):
        acc += _mix16(words, at + _4 * i, _16 * i, seed)
    acc = _avalanche(acc)
    for i in range(_8, n // _4):
        acc += _mix16(words, at + _4 * i, _16 * (i - _8) + _3, seed)
    return _avalanche(acc + _mix16(words, at + n - _4, _119, seed))


@inlined_allocating
def _seeded_secret(seed: np.uint64) -> U64:
    """The secret of long inputs: seed added to even, subtracted from odd 8-byte words."""
    secret = np.empty(24, dtype=np.uint64)
    for i in range(0, 24, 2):
        secret[i] = _SECRET[8 * i] + seed
        secret[i + 1] = _SECRET[8 * i + 8] - seed
    return secret


@inlined
def _unaligned(secret: U64, byte_at: np.uint64) -> np.uint64:
    """The u64 at a byte offset that is no multiple of 8."""
    word, shift = byte_at // _8, _8 * (byte_at % _8)
    return np.uint64((secret[word] >> shift) | (secret[word + _1] << (_64 - shift)))


@inlined
def _add_lane(acc: U64, lane: Index, value: np.uint64, key: np.uint64) -> None:
    keyed = value ^ key
    acc[lane ^ _1] += value
    acc[lane] += (keyed & _LOW32) * (keyed >> _32)


@inlined
def _scramble(acc: U64, secret: U64) -> None:
    for lane in range(_8):
        h = acc[lane]
        acc[lane] = ((h ^ (h >> _47)) ^ secret[_16 + lane]) * _P32_1


@inlined
def _merge(acc: U64, secret: U64, start: np.uint64) -> np.uint64:
    for pair in range(_4):
        i = _2 * pair
        low = acc[i] ^ _unaligned(secret, _11 + _8 * i)
        high = acc[i + _1] ^ _unaligned(secret, _19 + _8 * i)
        start += np.uint64(fold_multiply(low, high))
    return _avalanche(start)


@inlined
def _reset(acc: U64) -> None:
    acc[0], acc[1], acc[2], acc[3] = _P32_3, _P64_1, _P64_2, _P64_3
    acc[4], acc[5], acc[6], acc[7] = _P64_4, _P32_2, _P64_5, _P32_1


@inlined
def _hash_over_240(words: U32, at: np.uint64, n: np.uint64, secret: U64, acc: U64) -> np.uint64:
    """64-byte stripes, 16 to a round; the last stripe ends with the input."""
    _reset(acc)
    for stripe in range((n - _1) // _16):
        for lane in range(_8):
            value = _read(words, at + _16 * stripe + _2 * lane)
            _add_lane(acc, lane, value, secret[stripe % _16 + lane])
        if stripe % _16 == _15:
            _scramble(acc, secret)
    for lane in range(_8):
        value = _read(words, at + n - _16 + _2 * lane)
        _add_lane(acc, lane, value, _unaligned(secret, _121 + _8 * lane))
    return _merge(acc, secret, _4 * n * _P64_1)


@inlined
def _hash_short(words: U32, at: np.uint64, n: np.uint64, seed: np.uint64) -> np.uint64:
    """XXH3-64 of the n words at `at`, n <= 60."""
    if n <= _2:
        return _hash_4_to_8(words, at, n, seed)
    if n <= _4:
        low, high = _read(words, at), _read(words, at + n - _2)
        return _hash_9_to_16(low, high, _4 * n, seed)
    if n <= _32:
        return _hash_17_to_128(words, at, n, seed)
    return _hash_129_to_240(words, at, n, seed)


@inlined
def chain(parent: np.uint64, block_hash: np.uint64, seed: np.uint64) -> np.uint64:
    """The sequence hash of a block behind the sequence hash `parent`."""
    return _hash_9_to_16(parent, block_hash, _16, seed)


class _Link(NamedTuple):
    """How block hashes become sequence hashes on their way: from block `first` on, or not at all.

    A link takes as long as a block, but waits for the one before it: done together they overlap.
    """

    first: np.uint64
    parent: np.uint64
    seed: np.uint64


@inlined
def _linked(link: _Link, before: np.uint64, block_hash: np.uint64, i: Index) -> np.uint64:
    return chain(before, block_hash, link.seed) if i >= link.first else block_hash


@inlined_allocating
def _fill_long(
    tokens: U32, window: np.uint64, stride: np.uint64, seed: np.uint64, link: _Link, out_hashes: U64
) -> None:
    secret, acc, h = _seeded_secret(seed), np.empty(8, dtype=np.uint64), link.parent
    for i in range(np.uint64(len(out_hashes))):
        h = _linked(link, h, _hash_over_240(tokens, i * stride, window, secret, acc), i)
        out_hashes[i] = h


@inlined
def _fill_windows(
    tokens: U32, window: int, stride: int, seed: np.uint64, link: _Link, out_hashes: U64
) -> None:
    n, step, num_blocks = np.uint64(window), np.uint64(stride), np.uint64(len(out_hashes))
    h = link.parent
    # With a constant length LLVM unrolls the rounds and keeps the keys in registers: the two sizes
    # that engines use most.
    if n == _16:
        for i in range(num_blocks):
            h = _linked(link, h, _hash_17_to_128(tokens, i * step, _16, seed), i)
            out_hashes[i] = h
    elif n == _32:
        for i in range(num_blocks):
            h = _linked(link, h, _hash_17_to_128(tokens, i * step, _32, seed), i)
            out_hashes[i] = h
    elif n <= _60:
        for i in range(num_blocks):
            h = _linked(link, h, _hash_short(tokens, i * step, n, seed), i)
            out_hashes[i] = h
    else:
        _fill_long(tokens, n, step, seed, link, out_hashes)


@inlined
def fill_sequence_hashes(
    tokens: U32, block_size: int, seed: np.uint64, parent: np.uint64, chain_seed: np.uint64,
    out_hashes: U64,
) -> None:  # fmt: skip
    """hash_sequence for a part of another kernel; `parent` 0: at the start of a sequence."""
    link = _Link(_1 if parent == _0 else _0, parent, chain_seed)
    _fill_windows(tokens, block_size, block_size, seed, link, out_hashes)


@kernel(void(reads(u4), i8, i8, u8, writes(u8)))
def hash_blocks(tokens: U32, window: int, stride: int, seed: np.uint64, out_hashes: U64) -> None:
    """out_hashes[i] = XXH3-64 of tokens[i * stride : i * stride + window].

    window >= 1, and the last window ends within the tokens. Blocks without overlap have
    stride == window.
    """
    unlinked = _Link(np.uint64(len(out_hashes)), _0, _0)
    _fill_windows(tokens, window, stride, seed, unlinked, out_hashes)


@kernel(void(reads(u4), i8, i8, u8, b1, u8, u8, writes(u8)))
def hash_sequence(
    tokens: U32, window: int, stride: int, seed: np.uint64, has_parent: bool, parent: np.uint64,
    chain_seed: np.uint64, out_hashes: U64,
) -> None:  # fmt: skip
    """hash_blocks and chain_blocks in one go."""
    link = _Link(_0 if has_parent else _1, parent, chain_seed)
    _fill_windows(tokens, window, stride, seed, link, out_hashes)


@kernel(void(reads(u8), b1, u8, u8, writes(u8)))
def chain_blocks(
    block_hashes: U64, has_parent: bool, parent: np.uint64, seed: np.uint64, out_hashes: U64
) -> None:
    """out_hashes[i] = XXH3-64 of (out_hashes[i - 1], block_hashes[i]); `parent` stands before 0.

    Without a parent the first sequence hash is the block hash itself.
    """
    for i in range(np.uint64(len(block_hashes))):
        if i == _0 and not has_parent:
            parent = block_hashes[i]
        else:
            parent = chain(parent, block_hashes[i], seed)
        out_hashes[i] = parent


@kernel(void(reads(u4), reads(i8), i8, i8, reads(u8), u8, reads(i8), writes(u8)))
def hash_sequences(
    tokens: U32, ends: I64, window: int, stride: int, seeds: U64, chain_seed: np.uint64,
    block_ends: I64, out_hashes: U64,
) -> None:  # fmt: skip
    """Sequence hashes of many sequences in a row: sequence s ends before tokens[ends[s]].

    Its block hashes have the seed seeds[s], its chain `chain_seed`; its hashes end before
    out_hashes[block_ends[s]].
    """
    start, first, link = 0, 0, _Link(_1, _0, chain_seed)
    for s in range(len(ends)):
        end, last = ends[s], block_ends[s]
        _fill_windows(tokens[start:end], window, stride, seeds[s], link, out_hashes[first:last])
        start, first = end, last
