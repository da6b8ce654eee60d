"""Who reads the messages, and what must hold after each one.

In:  frames of a message.   Out: AssertionError for a rule that broke, any other error for a crash.

1. Nothing raises.
2. What was refused changed nothing: unless blocks were stored, removed, moved, cleared or (of a
   LoRA adapter that was loaded again) forgotten, the index is what it was; by its size after every
   message, by its whole content after some.
3. The blocks of a worker change by its own messages only.
4. `check()` finds the index sound.
"""

from contextlib import suppress

import msgspec

from kvplug import Rank, Router, RouterConfig, codec
from kvplug.errors import DecodeError
from kvplug.events import Tier
from kvplug.ingest.dispatch import TopicDispatcher
from kvplug.ingest.follower import Follower
from kvplug.topics import Topic
from kvplug.transports.zmq import message_of
from tests.fuzz import corpus
from tests.fuzz.lives import LifeMutator
from tests.fuzz.mutate import Mutator

_RANKS = (Rank("fed"), Rank("fed", 1))
_BYSTANDER = Rank("bystander")


class WatchedRouter(Router):
    """Knows whether anything was accepted since it was last asked."""

    def __init__(self):
        super().__init__(RouterConfig(block_size=corpus.BLOCK_SIZE))
        self._accepted = False
        self.add_worker("fed", dp_size=2)
        self.add_worker("bystander")

    def apply(self, rank, batch):
        return self.note(super().apply(rank, batch))

    def apply_records(self, rank, records):
        return self.note(super().apply_records(rank, records))

    def apply_packed(self, rank, payload, *, ts=0.0):
        return self.note(super().apply_packed(rank, payload, ts=ts))

    def note(self, applied):
        took = applied.num_removed or applied.num_moved or applied.num_cleared
        self._accepted |= bool(applied.num_stored or took or applied.num_forgotten)
        return applied

    def clear(self, rank):
        num_blocks = super().clear(rank)
        self._accepted |= bool(num_blocks)
        return num_blocks

    def take_accepted(self):
        accepted, self._accepted = self._accepted, False
        return accepted


class FollowerTarget:
    """The whole path: frames, sequence, kernels or codec, index."""

    name = "follower"
    min_reasons = 15  # that a short run finds

    def __init__(self, rng):
        self.router = WatchedRouter()
        self.follower = Follower(self.router, _RANKS[0])
        self.follower.on_connected()
        for _ in range(30):
            payload = msgspec.msgpack.encode(corpus.generated(rng))
            self.router.apply(_BYSTANDER, codec.decode(payload))
        self._bystander = self._blocks_of(_BYSTANDER)
        self._size = self._num_blocks()
        self.num_accepted = 0
        self.mutator = self.make_mutator(rng)

    def make_mutator(self, rng):
        return Mutator(rng)

    def feed(self, frames):
        """One message; says whether the index changed."""
        self.router.take_accepted()
        self.read(frames)
        before, self._size = self._size, self._num_blocks()
        accepted = self.router.take_accepted()
        assert accepted or self._size == before, f"refused, but {before} blocks became {self._size}"
        self.num_accepted += accepted
        return accepted

    def read(self, frames):
        self.follower.receive([message_of(frames)])

    def feed_and_compare(self, frames):
        """As `feed`, and the whole content is compared."""
        before = self.content()
        accepted = self.feed(frames)
        assert accepted or self.content() == before, "refused, but blocks changed"

    def check(self):
        for group in self.router.fleet_index.groups:
            group.index.check()
        assert self._blocks_of(_BYSTANDER) == self._bystander, "another worker's blocks changed"

    def content(self):
        """The engine hashes of the blocks that are held, per rank and tier."""
        return {(rank, tier): self._blocks_of(rank, tier) for rank in _RANKS for tier in Tier}

    def _blocks_of(self, rank, tier=None):
        return sorted(self.router.index_of(rank).engine_hashes_of(rank, tier).tolist())

    def _num_blocks(self):
        return sum(len(group.index) for group in self.router.fleet_index.groups)


class DispatchTarget(FollowerTarget):
    """The same behind a socket that engines share."""

    name = "dispatch"

    def __init__(self, rng):
        super().__init__(rng)
        self._dispatcher = TopicDispatcher()
        self._dispatcher.add(self.follower, Topic("pod", "model"))
        self._rng = rng

    def read(self, frames):
        if self._rng.random() < 0.01:
            self._dispatcher.on_connected()
            self._dispatcher.on_connected()
            self._dispatcher.on_disconnected()
        self._dispatcher.receive([message_of(frames)])


class CodecTarget(FollowerTarget):
    """The codec alone: plain messages, too, which the kernels read otherwise."""

    name = "codec"

    def read(self, frames):
        with suppress(DecodeError):
            batch = codec.decode(message_of(frames).payload)
            self.follower.skipped.update(batch.skipped)
            self.follower.skipped.update(self.router.apply(_RANKS[0], batch).rejected)


class LifeTarget(FollowerTarget):
    """Our own stream, with answers to asks: some damaged, some cut short, some never there."""

    name = "lives"
    min_reasons = 6

    def __init__(self, rng):
        super().__init__(rng)
        self._rng, self._now_s = rng, 0.0
        self.follower = Follower(self.router, _RANKS[0], clock=lambda: self._now_s)
        self.follower.can_ask_publisher = True
        self.follower.on_connected()
        self._asked, self._answer = None, []

    def make_mutator(self, rng):
        return LifeMutator(rng)

    def read(self, frames):
        self.follower.receive([message_of(frames)])
        self._now_s += self._rng.expovariate(4.0)
        self.follower.tick()
        if self._rng.random() < 0.002:
            self.follower.on_disconnected()
            self.follower.on_connected()
        self._hand_over(self._rng.randrange(4))

    def _hand_over(self, num_messages):
        request = self.follower.replay_request
        if request is not self._asked:
            self._asked = request
            self._answer = [] if request is None else self.mutator.answer(request.payload)
        part, self._answer = self._answer[:num_messages], self._answer[num_messages:]
        self.follower.replayed(part)
        if part and not self._answer and self.follower.replay_request is request:
            self.follower.replay_ended()


TARGETS = {
    target.name: target for target in (FollowerTarget, CodecTarget, DispatchTarget, LifeTarget)
}
