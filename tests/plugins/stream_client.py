"""The other end of our own stream: a follower in a few lines, straight from docs/protocol.md.

It applies what it is told to an index of its own, and asks when it lacks something.
"""

import zmq

from kvplug import protocol
from kvplug.events import Rank
from kvplug.index.block_index import BlockIndex
from kvplug.protocol import Ask, End, Events, Hello, Resident
from tests.plugins.stock_client import END, LIMIT_MS

RANK = Rank("engine")


def new_index(block_size):
    index = BlockIndex(block_size)
    index.add_rank(RANK)
    return index


class StreamClient:
    """Call `join`, then `follow` until `next`; `index` is what it holds then."""

    def __init__(self, block_size=4, topic=""):
        self.context, self._topic = zmq.Context(), topic
        self.index, self._block_size = new_index(block_size), block_size
        self.life = self.next = 0
        self.about, self.captured, self.live = None, [], []
        self._unread = []

    def join(self, endpoint, *, limit_ms=LIMIT_MS):
        """Subscribe; a hello comes."""
        self._sub = self.context.socket(zmq.SUB)
        self._sub.setsockopt(zmq.SUBSCRIBE, self._topic.encode())
        self._sub.connect(endpoint)
        return self.receive_hello(limit_ms=limit_ms)

    def receive(self, *, limit_ms=LIMIT_MS):
        """One live message, decoded."""
        assert self._sub.poll(limit_ms), "nothing came"
        _, number, payload = self._sub.recv_multipart()
        self.captured.append(payload)
        message = protocol.decode(payload)
        expected = message.number if isinstance(message, Events) else message.next
        assert int.from_bytes(number, "big") == expected
        if isinstance(message, Hello):
            self.about = message.about
        return message

    def receive_hello(self, *, limit_ms=LIMIT_MS):
        while True:
            message = self.receive(limit_ms=limit_ms)
            if isinstance(message, Hello):
                return message

    def ask(self, endpoint, life=0, next_=0):
        """The messages of an answer."""
        dealer = self.context.socket(zmq.DEALER)
        dealer.connect(endpoint)
        dealer.send_multipart([b"", protocol.encode(Ask(life, next_))])
        with dealer:
            messages = list(self._replies(dealer))
        assert isinstance(messages[0], Hello)
        assert isinstance(messages[-1], End)
        return messages

    def _replies(self, dealer):
        while True:
            assert dealer.poll(LIMIT_MS), "the answer does not end"
            empty, _, number, payload = dealer.recv_multipart()
            assert empty == b""
            if number == END:
                return
            self.captured.append(payload)
            yield protocol.decode(payload)

    def catch_up(self, endpoint):
        """Ask for what is missing, and be what the answer says."""
        for message in self.ask(endpoint, self.life, self.next):
            match message:
                case Hello(life=life, about=about):
                    self.about = about
                    if life != self.life:
                        self.life, self.next = life, 0
                        self.index = new_index(self._block_size)
                case Resident(part=part, packed=packed, next=next_):
                    if part == 0:
                        self.index = new_index(self._block_size)
                    self.next = next_
                    self.index.apply_packed(RANK, packed)
                case Events():
                    self._apply(message)
                case End(next=next_):
                    assert self.next == next_

    def follow(self, until):
        """Apply live events up to number `until`."""
        while self.next < until:
            message = self.receive()
            if isinstance(message, Events) and message.number >= self.next:
                self._apply(message)

    def follow_to_hello(self):
        """Apply live events up to the next hello, which says that these are all so far."""
        while not isinstance(message := self.receive(), Hello):
            if message.number >= self.next:
                self._apply(message)
        assert message.next <= self.next

    def _apply(self, message):
        assert (message.life, message.number) == (self.life, self.next)
        self.index.apply_packed(RANK, message.packed)
        self.next += 1

    def names(self):
        return {int(name) for name in self.index.engine_hashes_of(RANK)}

    def ask_and_not_read(self, endpoint, life=0, next_=0):
        dealer = self.context.socket(zmq.DEALER)
        self._unread.append(dealer)
        dealer.setsockopt(zmq.RCVHWM, 1)
        dealer.setsockopt(zmq.RCVBUF, 4096)
        dealer.connect(endpoint)
        dealer.send_multipart([b"", protocol.encode(Ask(life, next_))])

    def send_nonsense(self, endpoint):
        dealer = self.context.socket(zmq.DEALER)
        self._unread.append(dealer)
        dealer.connect(endpoint)
        hello = protocol.encode(Hello(1, 2, 3.0, protocol.WorkerHello()))
        for request in ([b""], [b"", b"short"], [b"a", b"b", b"c"], [b"x"], [b"", hello]):
            dealer.send_multipart(request)

    def close(self):
        self.context.destroy(linger=0)
