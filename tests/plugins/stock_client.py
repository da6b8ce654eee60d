"""The other end of the publisher's sockets, as any follower of stock events has it."""

import threading
import time

import msgspec
import zmq

from kvplug.events import AllBlocksCleared, BlockStored
from kvplug.wire import to_wire

LIMIT_MS = 10_000
END = b"\xff" * 8


class EngineBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    """vLLM's EventBatch, which its scheduler fills without a rank."""

    ts: float
    events: list
    data_parallel_rank: int | None = None


def stored(first_token):
    tokens = tuple(range(first_token, first_token + 4))
    return BlockStored(block_hashes=(first_token,), token_ids=tokens, block_size=4)


def engine_batch(first_token):
    return EngineBatch(float(first_token), [to_wire(stored(first_token))])


def clear():
    return EngineBatch(0.0, [to_wire(AllBlocksCleared())])


class StockClient:
    """A subscriber that can also ask for a replay."""

    def __init__(self, topic=""):
        self._context = zmq.Context()
        self._topic = topic
        self._unread = []

    def subscribe(self, endpoint):
        """Connect; the publisher may learn of the subscription a moment after this returns."""
        self._sub = self._context.socket(zmq.SUB)
        self._sub.setsockopt(zmq.SUBSCRIBE, self._topic.encode())
        monitor = self._sub.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._sub.connect(endpoint)
        assert monitor.poll(LIMIT_MS), f"nobody publishes at {endpoint}"
        self._sub.disable_monitor()
        monitor.close(linger=0)

    def has_message(self, *, timeout_ms):
        return bool(self._sub.poll(timeout_ms))

    def receive(self):
        assert self._sub.poll(LIMIT_MS), "nothing came"
        return self._sub.recv_multipart()

    def replay(self, endpoint, first):
        """[(topic, number, payload)] from `first` on, up to the end marker."""
        dealer = self._context.socket(zmq.DEALER)
        dealer.connect(endpoint)
        dealer.send_multipart([b"", first.to_bytes(8, "big")])
        return list(self._replies(dealer))

    def _replies(self, dealer):
        with dealer:
            while True:
                assert dealer.poll(LIMIT_MS), "the replay does not end"
                empty, topic, number, payload = dealer.recv_multipart()
                assert empty == b""
                if number == END:
                    assert (topic, payload) == (b"", b"")
                    return
                yield topic, int.from_bytes(number, "big"), payload

    def ask_nonsense(self, endpoint):
        dealer = self._open_unread(endpoint)
        for request in ([b""], [b"", b"short"], [b"a", b"b", b"c", b"d"], [b"x" * 100]):
            dealer.send_multipart(request)

    def ask_and_not_read(self, endpoint):
        self._open_unread(endpoint).send_multipart([b"", bytes(8)])

    def _open_unread(self, endpoint):
        dealer = self._context.socket(zmq.DEALER)
        self._unread.append(dealer)
        dealer.setsockopt(zmq.RCVHWM, 1)
        dealer.setsockopt(zmq.RCVBUF, 4096)
        dealer.connect(endpoint)
        return dealer

    def close(self):
        for each in self._unread:
            each.close(linger=0)
        self._context.destroy(linger=0)


def wait_until(condition, what, *, timeout_s=30.0):
    deadline = time.monotonic() + timeout_s
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s in vain until {what}"
        pause.wait(0.005)
