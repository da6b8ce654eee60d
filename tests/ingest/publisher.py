"""A stock-like event publisher on real sockets, for tests."""

import threading

import zmq

from kvplug import codec
from kvplug.events import BlockStored, EventBatch
from kvplug.transports.base import Message
from tests.plugins.stock_client import wait_until

TOPIC = b"kv@pod@model"


def stored(first_token, num_blocks=1, block_size=4, **more):
    """A run of blocks whose names are derived from their first token."""
    num_tokens = num_blocks * block_size + more.get("bigrams", False)
    tokens = tuple(range(first_token, first_token + num_tokens))
    names = tuple(1000 * first_token + i for i in range(num_blocks))
    return BlockStored(block_hashes=names, token_ids=tokens, block_size=block_size, **more)


def message(number, *events, dp_rank=0, topic=TOPIC):
    """As a transport hands it over."""
    return Message(topic, number, codec.encode(EventBatch(events=events, dp_rank=dp_rank)))


def frames_of(message):
    """The three frames of vLLM and SGLang."""
    return [message.topic, message.sequence.to_bytes(8, "big"), message.payload]


def bind(socket, port=0):
    """Bind to the port, or to any for 0; returns it.

    Waits for it: ZMQ closes the socket that had the port before in a thread of its own.
    """

    def is_bound():
        try:
            socket.bind(f"tcp://127.0.0.1:{port or '*'}")
        except zmq.ZMQError as error:
            if error.errno != zmq.EADDRINUSE:
                raise
            return False
        return True

    wait_until(is_bound, "the port is free again")
    return int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])


class Publisher:
    """A PUB socket that can die and come back on its port."""

    def __init__(self):
        self._context = zmq.Context()
        self._port = 0
        self.open()

    @property
    def endpoint(self):
        return f"tcp://127.0.0.1:{self._port}"

    def open(self):
        self._socket = self._context.socket(zmq.XPUB)
        self._port = bind(self._socket, self._port)

    def further_endpoint(self):
        """Of the same messages, on a port of its own."""
        return f"tcp://127.0.0.1:{bind(self._socket)}"

    def wait_for_a_subscriber(self, timeout_ms=10_000):
        """XPUB hands out subscriptions, so nothing is published into the void."""
        assert self._socket.poll(timeout_ms), "nobody subscribed"
        self._socket.recv()

    def send(self, message):
        """A Message, or any frames."""
        frames = frames_of(message) if isinstance(message, Message) else message
        self._socket.send_multipart(frames)

    def close(self):
        self._socket.close(linger=0)

    def destroy(self):
        self._context.destroy(linger=0)


END = [b"", b"", b"\xff" * 8, b""]


class ReplayServer:
    """A ROUTER as vLLM's and SGLang's publishers have one; `history` is what it sends again."""

    def __init__(self, *, with_topic=True, num_ports=1):
        self.history, self.asked, self._with_topic = [], [], with_topic
        self.is_silent = False
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        ports = [bind(self._socket) for _ in range(num_ports)]
        self.endpoints = [f"tcp://127.0.0.1:{port}" for port in ports]
        self.endpoint = self.endpoints[0]
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        while not self._stopping.is_set():
            if self._socket.poll(20):
                client, _, start = self._socket.recv_multipart()
                self.asked.append(int.from_bytes(start, "big"))
                if not self.is_silent:
                    self._answer(client, self.asked[-1])

    def _answer(self, client, start):
        for each in list(self.history):
            if each.sequence >= start:
                frames = frames_of(each)[0 if self._with_topic else 1 :]
                self._socket.send_multipart([client, b"", *frames])
        self._socket.send_multipart([client, *END])

    def close(self):
        self._stopping.set()
        self._thread.join()
        self._context.destroy(linger=0)
