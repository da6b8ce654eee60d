"""A publisher of ours as a model: lives, events, a bounded history, resident sets."""

from collections import deque
from itertools import count, islice

from kvplug import Rank, Router, RouterConfig, packed, protocol
from kvplug.ingest import trust
from kvplug.transports.base import Message
from tests.ingest.publisher import TOPIC

RANK = Rank("w")
_lives = count(1)


class TellableRouter(Router):
    """What a publisher said of its engine is in `told`."""

    def __init__(self, block_size=4, **more):
        super().__init__(RouterConfig(block_size=block_size, **more))
        self.told = {}

    def set_blocks(self, rank, block_size, *, bigrams=False):
        self.told["blocks"] = block_size, bigrams
        return super().set_blocks(rank, block_size, bigrams=bigrams)

    def set_cxl_pools(self, worker, pool_ids):
        self.told["pools"] = worker, pool_ids
        super().set_cxl_pools(worker, pool_ids)

    def set_cache_capacity(self, rank, num_blocks):
        self.told["capacity"] = rank, num_blocks
        super().set_cache_capacity(rank, num_blocks)


class LifePublisher:
    """Each call that publishes returns the Message; what becomes of it is up to the caller.

    `held`: the engine hashes that the engine holds. `history`: the last events of this life.
    `held_before`: what it held before each number of each life.
    """

    def __init__(self, *, max_history=1000, part_size=3, first_name=1, remembers=True, **about):
        self._names, self._part_size = count(first_name), part_size
        self._max_history, self._remembers = max_history, remembers
        self.about = {"block_size": 4, "answers_at": "tcp://*:5558", **about}
        self.held_before = {}
        self.restart()

    def restart(self):
        """Another process: its engine holds nothing."""
        self.held, self._parents = [], {}
        self.begin_life()

    def begin_life(self):
        """Numbers were lost. One that begins with number 0 begins with nothing."""
        self.life, self.next = next(_lives), int(bool(self.held))
        self.history = deque(maxlen=self._max_history)
        if self._remembers:
            self.held_before[self.life] = [frozenset()] * self.next + [frozenset(self.held)]

    def hello(self):
        return self._message(self.next, protocol.Hello(self.life, self.next, 1.0, self._about()))

    def store(self, num_blocks=1, *, parent=None):
        names = list(islice(self._names, num_blocks))
        for name, before in zip(names, [parent, *names], strict=False):
            self.held.append(name)
            self._parents[name] = before
        return self.publish(_stored(names, parent))

    def remove_last(self, num_blocks=1):
        names = [self.held.pop() for _ in range(min(num_blocks, len(self.held)))]
        return self.publish(packed.PackedRemoved(names))

    def clear(self):
        self.held = []
        return self.publish(packed.PackedCleared())

    def publish(self, *events):
        """A message with any packed events, or bytes in their place."""
        is_raw = len(events) == 1 and isinstance(events[0], bytes)
        said = events[0] if is_raw else packed.encode(events)
        message = self._message(self.next, protocol.Events(self.life, self.next, 1.0, said))
        self.next += 1
        self.history.append(message)
        if self._remembers:
            self.held_before[self.life].append(frozenset(self.held))
        return message

    def answer(self, request):
        """To the bytes of an ask: messages."""
        ask = protocol.decode(request)
        first = self.next - len(self.history)
        if ask.life == self.life and first <= ask.next <= self.next and ask.life:
            said = [each for each in self.history if each.sequence >= ask.next]
        else:
            said = self.resident_set()
        return [self.hello(), *said, self.end()]

    def resident_set(self):
        parts = [
            self.held[i : i + self._part_size] for i in range(0, len(self.held), self._part_size)
        ] or [[]]
        for i, names in enumerate(parts):
            said = packed.encode([_stored([name], self._parents[name]) for name in names])
            part = protocol.Resident(self.life, self.next, i, len(parts), said)
            yield self._message(self.next, part)

    def end(self):
        return self._message(self.next, protocol.End(self.life, self.next))

    def _about(self):
        return protocol.WorkerHello(**self.about)

    def _message(self, number, said):
        return Message(TOPIC, number, protocol.encode(said))


def _stored(names, parent):
    hashes = [name * 0x9E3779B97F4A7C15 % 2**64 for name in names]
    return packed.PackedStored(names, hashes, parent)


def message_of(said, number=0):
    """Any message of the protocol, as a transport hands it over."""
    return Message(TOPIC, number, protocol.encode(said))


class Clock:
    now_s = 100.0

    def __call__(self):
        return self.now_s


def names(router):
    return sorted(int(name) for name in router.index.engine_hashes_of(RANK))


def answer(follower, publisher):
    """The ask that is open, if any, is answered in full."""
    request = follower.replay_request
    assert request is not None
    follower.replayed(publisher.answer(request.payload))
    if follower.replay_request is request:
        follower.replay_ended()


def join(follower, publisher):
    follower.receive([publisher.hello()])
    if follower.trust is not trust.EXACT:  # it holds something
        answer(follower, publisher)
    assert follower.trust is trust.EXACT


def wait(follower, clock, seconds, publisher=None):
    """Heartbeats go on, if there is a publisher."""
    for _ in range(round(seconds)):
        clock.now_s += 1.0
        if publisher is not None:
            follower.receive([publisher.hello()])
        follower.tick()
