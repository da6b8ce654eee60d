"""A subscription on real sockets: both forms, and a peer whose machine is gone."""

import select
import socket
import threading

import pytest
import zmq

from kvplug.curve_keys import ClientKeys
from kvplug.errors import TransportError
from kvplug.transports.base import Connection, Message
from kvplug.transports.zmq import ZmqTransport, message_of, reachable
from tests.waiting import until


class Relay:
    """A TCP connection through here goes silent on request, as when a cable is pulled."""

    def __init__(self, endpoint):
        self._target = int(endpoint.rpartition(":")[2])
        self._server = socket.create_server(("127.0.0.1", 0))
        self._server.settimeout(10)
        self.endpoint = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"
        self._ends, self._wake = [], socket.socketpair()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def freeze(self):
        self._wake[0].send(b"\0")
        self._thread.join()

    def close(self):
        self.freeze()
        for each in (*self._ends, *self._wake, self._server):
            each.close()

    def _run(self):
        self._ends = [
            self._server.accept()[0],
            socket.create_connection(("127.0.0.1", self._target)),
        ]
        while True:
            ready, _, _ = select.select([*self._ends, self._wake[1]], [], [])
            if self._wake[1] in ready:
                return
            for end in ready:
                self._ends[self._ends.index(end) - 1].sendall(end.recv(65536))


@pytest.fixture
def context():
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def opened():
    """Makes sources, and closes them."""
    transport = ZmqTransport(heartbeat_s=1.0)

    def open_(endpoint, topic="", *, bind=False):
        if bind:
            return transport.bind(endpoint, topic)[0]
        return transport.connect(endpoint, topic, None)

    yield open_
    transport.close()


@pytest.fixture
def publisher(context):
    with context.socket(zmq.XPUB) as publisher:
        publisher.linger = 0
        yield publisher


@pytest.fixture
def relayed():
    """Makes relays, and closes them."""
    relays = []

    def to(endpoint):
        relays.append(Relay(endpoint))
        return relays[-1]

    yield to
    for relay in relays:
        relay.close()


async def changes_of(subscription, change):
    changes = []

    def has_come():
        changes.extend(subscription.connection_changes())
        return change in changes

    await until(has_come, f"the subscription is told: {change.value}")


@pytest.mark.parametrize("bind", [False, True])
async def test_a_peer_that_goes_silent_is_gone(publisher, relayed, opened, bind):
    if bind:
        subscription = opened("tcp://127.0.0.1:*", bind=True)
        relay = relayed(subscription.endpoint)
        publisher.connect(relay.endpoint)
    else:
        publisher.bind("tcp://127.0.0.1:*")
        relay = relayed(publisher.getsockopt_string(zmq.LAST_ENDPOINT))
        subscription = opened(relay.endpoint)
    await changes_of(subscription, Connection.OPENED)

    def is_subscribed():
        assert subscription.receive(1) == []  # a SUB socket subscribes when it is looked at
        return publisher.poll(0)

    await until(is_subscribed, "the subscription arrives")
    publisher.send_multipart([b"topic", b"said"])
    received = []
    await until(lambda: received.extend(subscription.receive(10)) or received, "a message passes")
    assert received == [Message(b"topic", None, b"said")]
    relay.freeze()
    await changes_of(subscription, Connection.LOST)


def test_an_endpoint_is_bound_with_its_port(opened):
    subscription = opened("tcp://127.0.0.1:*", bind=True)
    assert int(subscription.endpoint.rpartition(":")[2]) > 0


def test_an_endpoint_that_is_taken_is_rejected(opened):
    taken = opened("tcp://127.0.0.1:*", bind=True).endpoint
    with pytest.raises(TransportError, match=r"cannot bind .*Address already in use"):
        opened(taken, bind=True)


async def test_messages_of_other_shapes_do_not_shift_the_stock_ones(publisher, opened):
    port = publisher.bind_to_random_port("tcp://127.0.0.1")
    subscription = opened(f"tcp://127.0.0.1:{port}")
    assert publisher.poll(10_000)
    publisher.recv()
    stock = [[b"t", number.to_bytes(8, "big"), b"payload"] for number in range(6)]
    odd = [[b"t", b"two parts"], [b"u", b"another topic"], [b"t", b"4", b"5", b"6"], [b"v"]]
    sent = [stock[0], stock[1], odd[0], stock[2], odd[1], stock[3], odd[2], stock[4], odd[3]]
    sent.append(stock[5])
    for frames in sent:
        publisher.send_multipart(frames)
    received = []
    await until(lambda: received.extend(subscription.receive(3)) or len(received) == 10, "all")
    assert received == [message_of(frames) for frames in sent]
    assert [message.malformed is None for message in received].count(False) == 2


def test_the_parts_of_a_message_have_names():
    number = (258).to_bytes(8, "big")
    assert message_of([b"kv@a", number, b"p"]) == Message(b"kv@a", 258, b"p")
    assert message_of([b"", b"\xff" * 8, b""]) == Message(b"", 2**64 - 1, b"")
    assert message_of([b"kv", b"p"]) == Message(b"kv", None, b"p")


@pytest.mark.parametrize("frames", [[], [b"p"], [b"t", b"\x01", b"p"], [b"", b"t", bytes(8), b"p"]])
def test_other_frames_are_malformed(frames):
    assert message_of(frames).malformed.startswith("cannot read a message: expected")


@pytest.mark.parametrize(
    ("named", "connected", "expected"),
    [
        ("tcp://*:5558", "tcp://10.0.0.7:5557", "tcp://10.0.0.7:5558"),
        ("tcp://0.0.0.0:5558", "tcp://engine.svc:5557", "tcp://engine.svc:5558"),
        ("tcp://[::]:5558", "tcp://[fe80::1]:5557", "tcp://[fe80::1]:5558"),
        ("tcp://10.0.0.8:5558", "tcp://10.0.0.7:5557", "tcp://10.0.0.8:5558"),
        ("tcp://10.0.0.8:5558", "ipc:///run/kv", "tcp://10.0.0.8:5558"),
        ("ipc:///run/asks", "ipc:///run/kv", "ipc:///run/asks"),
    ],
)
def test_what_a_publisher_names_is_seen_from_where_its_stream_is(named, connected, expected):
    assert reachable(named, connected) == expected


@pytest.mark.parametrize(
    ("named", "connected"),
    [
        ("ipc:///run/asks", "tcp://10.0.0.7:5557"),
        ("inproc://asks", "tcp://10.0.0.7:5557"),
        ("tcp://*:5558", "ipc:///run/kv"),
        ("tcp://10.0.0.7:*", "tcp://10.0.0.7:5557"),
        ("tcp://10.0.0.7", "tcp://10.0.0.7:5557"),
        ("", "tcp://10.0.0.7:5557"),
        ("nonsense", "tcp://10.0.0.7:5557"),
    ],
)
def test_what_a_publisher_must_not_name_is_refused(named, connected):
    with pytest.raises(TransportError, match="expected an endpoint like tcp://"):
        reachable(named, connected)


def test_client_keys_bind_nothing():
    keys = ClientKeys(b"public", b"server", b"secret")
    transport = ZmqTransport(keys=keys)
    with pytest.raises(TransportError, match="expected publishers to connect to"):
        transport.bind("tcp://127.0.0.1:*", "")
    transport.close()


async def test_a_handshake_that_fails_loses_nothing(context, opened):
    """ZMQ tries again after a pause; the event thread would at once."""
    plain = context.socket(zmq.REP)  # no peer of a subscription
    plain.bind("tcp://127.0.0.1:*")
    monitor = plain.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    source = opened(plain.getsockopt_string(zmq.LAST_ENDPOINT))
    await until(lambda: monitor.poll(0), "they do not fit together")
    assert source.connection_changes() == []
    plain.disable_monitor()
    monitor.close()
    plain.close()
