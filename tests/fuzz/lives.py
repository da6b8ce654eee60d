"""Ways to damage messages of our own stream, and answers to asks.

In:  a random generator.   Out: messages of a publisher that lives on, damaged or not.

Damage is done to bytes, to the parts of a message, and to the packed events in it.
"""

import msgspec

from kvplug.transports.base import Message
from tests.fuzz.mutate import Mutator
from tests.ingest.life_publisher import LifePublisher
from tests.ingest.publisher import TOPIC

_MAX_HELD = 200
_NUM_KEPT = 200
_VALUES = (
    None, True, 0, 1, -1, 2, 99, 2**32, 2**63, 2**64 - 1, -(2**63), 1.5, float("nan"), "", "events",
    "hello", "ask", "nothing", "x" * 5000, b"", bytes(8), [], {}, [[]], {"block_size": 4},
    {"block_size": 2**40}, {"dp_rank": 2**70 % 2**64}, {"defects": {"x" * 900: 1}},
    {"cxl_pools": [2**63]}, {"answers_at": "\n"}, {"capacity_blocks": -1}, {"hash_scheme": "sha"},
    {"block_size": 4, "bigrams": True}, {"block_size": 4, "hides_states": True},
    msgspec.Raw(b"\x91" * 1500 + b"\xc0"), msgspec.Raw(b"\xdd\xff\xff\xff\xff"),
)  # fmt: skip


class LifeMutator(Mutator):
    """As Mutator, with `answer` to an ask."""

    def __init__(self, rng):
        super().__init__(rng)
        self._publisher = LifePublisher(max_history=20, remembers=False, dp_rank=0)
        self._stock, self._payloads = self._payloads, [self._publisher.hello().payload]

    def payload(self):
        """Half of the messages are sound."""
        dice = self._rng.random()
        if dice < 0.5:
            return self._next()
        if dice < 0.75:
            return self._damaged_bytes()
        if dice < 0.995:
            return self._damaged_parts(self._rng.choice(self._payloads))
        return self._rng.choice(self._stock)

    def cleared(self):
        return self._kept(self._publisher.clear())

    def frames(self, payload):
        """The transport's numbers mean nothing here."""
        return [TOPIC, self._rng.choice((0, 1, 2**63)).to_bytes(8, "big"), payload]

    def answer(self, request):
        """To the bytes of an ask; one in three is damaged somewhere, one in ten never comes."""
        if len(request) <= 8 or self._rng.random() < 0.1:
            return []
        said = self._publisher.answer(request)
        dice, at = self._rng.random(), self._rng.randrange(len(said))
        if dice < 0.1:
            del said[at]
        elif dice < 0.2:
            said.insert(at, self._rng.choice(said))
        elif dice < 0.3:
            damaged = self._damaged_parts(said[at].payload)
            said[at] = Message(said[at].topic, said[at].sequence, damaged)
        return said

    def _next(self):
        publisher, dice = self._publisher, self._rng.random()
        if len(publisher.held) > _MAX_HELD:
            return self.cleared()
        if dice < 0.005:
            publisher.restart()
        elif dice < 0.01:
            publisher.begin_life()
        elif dice < 0.02:
            publisher.store(1)  # lost
        elif dice < 0.6:
            parent = self._rng.choice([None, *publisher.held[:3]])
            return self._kept(publisher.store(self._rng.randrange(1, 5), parent=parent))
        elif dice < 0.8:
            return self._kept(publisher.remove_last(self._rng.randrange(1, 4)))
        return self._kept(publisher.hello())

    def _kept(self, message):
        self._payloads.append(message.payload)
        if len(self._payloads) > 2 * _NUM_KEPT:
            del self._payloads[:_NUM_KEPT]
        return message.payload

    def _damaged_parts(self, payload):
        """One part of a message is another; or one byte of what is packed in it is."""
        parts = msgspec.msgpack.decode(payload)
        at = self._rng.randrange(len(parts))
        packed = parts[-1]
        if isinstance(packed, bytes) and packed and self._rng.random() < 0.5:
            where = self._rng.randrange(len(packed))
            parts[-1] = packed[:where] + self._rng.randbytes(1) + packed[where + 1 :]
        elif self._rng.random() < 0.2:
            parts = parts[:at]
        elif self._rng.random() < 0.2 and isinstance(packed, dict):
            parts[-1] = packed | self._rng.choice([v for v in _VALUES if isinstance(v, dict)])
        else:
            parts[at] = self._rng.choice(_VALUES)
        return msgspec.msgpack.encode(parts)
