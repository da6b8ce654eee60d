"""Ways to damage a message.

In:  seeds, a random generator.   Out: the frames of one message, damaged or not.

Half of the damage is done to bytes and half to msgpack values, because bytes alone hardly ever
leave a batch that opens, and values alone never one that does not.
"""

import msgspec

from kvplug import wire
from tests.fuzz import corpus

_TOPICS = (b"kv@pod@model", b"", b"kv@", b"\xff\xfe", b"kv@other@model", b"x" * 300)
_OPCODES = bytes([0x80, 0x90, 0x91, 0x9F, 0xA0, *range(0xC0, 0xE0), 0xFF])
_RAW = msgspec.Raw
_JUNK = (
    None, True, False, 0, 1, -1, 4, 2**16 + 1, 2**31, 2**32, 2**63, 2**64 - 1, -(2**63),
    0.0, -1.5, float("nan"), float("inf"), "", "GPU", "mamba", "x" * 70, "é\U0001f600",
    b"", b"12345678", bytes(16), bytes(32), bytes(65), [], {}, [None], [[]], [1, 2], {"type": 1},
    [[1, 2], [2, 3]], {"mm_objects": [{"mm_hash": 1}]}, {7: 8}, {"cache_salt": "s"},
    _RAW(b"\x91" * 1500 + b"\xc0"), _RAW(b"\x81\xa1a" * 700 + b"\xc0"), _RAW(b"\xc1"),
    _RAW(b"\xd4\x01\x00"), _RAW(b"\xd6\xff\x00\x00\x00\x01"), _RAW(b"\xdd\xff\xff\xff\xff"),
    _RAW(b"\xc6\xff\xff\xff\xff"), _RAW(b"\xa2\xff\xfe"), _RAW(b"\x81\x90\xc0"),
)  # fmt: skip
_NAMES = (
    *dict.fromkeys([*wire.Stored.__struct_fields__, *wire.Transition.__struct_fields__]),
    "type", "events", "ts", "dp_rank", "unheard_of",
)  # fmt: skip
_TYPES = ("BlockStored", "BlockRemoved", "AllBlocksCleared", "CxlStateTransition", "BlockMoved")
_GAPS = (0, -1, 1, 2, 1000, 2**40)


class Mutator:
    """`payload` and `frames`, each call another one."""

    def __init__(self, rng):
        self._rng = rng
        self._payloads = corpus.captured()
        self._values = [msgspec.msgpack.decode(payload) for payload in self._payloads]
        self._next_number = 0

    def payload(self):
        """One payload; about a sixth is as an engine would send it."""
        dice = self._rng.random()
        if dice < 0.3:
            return self._damaged_bytes()
        if dice < 0.84:
            return _pack(self._damaged_value(self._value(), 0))
        return _pack(corpus.generated(self._rng))

    def cleared(self):
        """The payload of a message that empties the rank."""
        return corpus.cleared()

    def frames(self, payload):
        """A message around the payload; one in twenty has other frames than it should."""
        dice = self._rng.random()
        if dice > 0.05:
            number, self._next_number = self._next_number, self._next_number + 1
            return [_TOPICS[0], number.to_bytes(8, "big"), payload]
        if dice > 0.03:
            number = max(0, self._next_number + self._rng.choice(_GAPS))
            self._next_number = number + 1
            return [self._topic(), number.to_bytes(8, "big"), payload]
        frames = [self._topic(), self._rng.randbytes(self._rng.randrange(8)), payload]
        self._rng.shuffle(frames)
        return frames[: self._rng.randrange(4)] * self._rng.randrange(1, 3)

    def _topic(self):
        if self._rng.random() < 0.3:
            return b"kv@pod-%d@model" % self._rng.randrange(2**40)
        return self._rng.choice(_TOPICS)

    def _value(self):
        if self._rng.random() < 0.5:
            return corpus.generated(self._rng)
        return self._rng.choice(self._values)

    def _damaged_bytes(self):
        rng = self._rng
        payload = bytearray(rng.choice(self._payloads))
        for _ in range(rng.randrange(1, 5)):
            at = rng.randrange(len(payload)) if payload else 0
            rng.choice(_BYTE_DAMAGES)(self, payload, at)
        return bytes(payload)

    def _flip(self, payload, at):
        payload[at : at + 1] = bytes([self._rng.randrange(256)])

    def _opcode(self, payload, at):
        payload[at : at + 1] = bytes([self._rng.choice(_OPCODES)])

    def _truncate(self, payload, at):
        del payload[at:]

    def _cut(self, payload, at):
        del payload[at : at + self._rng.randrange(1, 9)]

    def _insert(self, payload, at):
        payload[at:at] = self._rng.randbytes(self._rng.randrange(1, 5))

    def _repeat(self, payload, at):
        payload[at:at] = payload[at : at + self._rng.randrange(1, 33)]

    def _splice(self, payload, at):
        other = self._rng.choice(self._payloads)
        payload[at:] = other[min(at, len(other)) :]

    def _damaged_value(self, value, depth):
        """The value with one place in it changed."""
        rng = self._rng
        if not isinstance(value, list | dict) or not value or rng.random() < 0.04 * depth:
            return self._other(value)
        copy = value.copy()
        if isinstance(copy, list):
            return self._damaged_list(copy, depth)
        key = rng.choice(list(copy))
        dice = rng.random()
        if dice < 0.1:
            del copy[key]
        elif dice < 0.3:
            copy[rng.choice(_NAMES)] = rng.choice(_JUNK)
        else:
            copy[key] = self._damaged_value(copy[key], depth + 1)
        return copy

    def _damaged_list(self, values, depth):
        at, dice = self._rng.randrange(len(values)), self._rng.random()
        if depth == 0 and dice < 0.85:  # into the events: a batch with a wrong rank tells little
            values[1:2] = [self._damaged_value(value, 1) for value in values[1:2]]
            return values
        if dice < 0.08:
            del values[at]
        elif dice < 0.16:
            values.insert(at, self._rng.choice(_JUNK))
        elif dice < 0.2:
            values *= 2
        else:
            values[at] = self._damaged_value(values[at], depth + 1)
        return values

    def _other(self, value):
        rng = self._rng
        dice = rng.random()
        if isinstance(value, str) and dice < 0.3:
            return rng.choice(_TYPES)
        if isinstance(value, int) and dice < 0.5:
            other = value + rng.choice((-1, 1, 2**32, -value, rng.randrange(2**31)))
            return other if -(2**63) <= other < 2**64 else 0
        return rng.choice(_JUNK)


_BYTE_DAMAGES = (
    Mutator._flip, Mutator._flip, Mutator._opcode, Mutator._truncate, Mutator._cut,
    Mutator._insert, Mutator._repeat, Mutator._splice,
)  # fmt: skip


def _pack(value):
    return msgspec.msgpack.encode(value)
