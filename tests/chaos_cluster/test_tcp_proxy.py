"""The proxy between processes and NATS servers: it leads there, breaks, and leads there again."""

import contextlib
import socket
import threading

import pytest

from tests.chaos_cluster.tcp_proxy import TcpProxy


@pytest.fixture
def echo_port():
    """A server that sends back what it gets."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve():
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=echo, args=(connection,), daemon=True).start()

    def echo(connection):
        with connection, contextlib.suppress(OSError):
            while data := connection.recv(1024):
                connection.sendall(data)

    threading.Thread(target=serve, daemon=True).start()
    yield listener.getsockname()[1]
    listener.close()


@pytest.fixture
def proxy(echo_port):
    with TcpProxy(echo_port) as proxy:
        yield proxy


@contextlib.contextmanager
def connected(proxy):
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=5) as client:
        yield client


def test_it_leads_there(proxy):
    with connected(proxy) as client:
        client.sendall(b"one")
        assert client.recv(10) == b"one"
    assert proxy.num_connections == 1


def test_a_stalled_way_holds_everything_back(proxy):
    with connected(proxy) as client:
        client.sendall(b"one")
        assert client.recv(10) == b"one"
        proxy.stall()
        client.sendall(b"two")
        client.settimeout(0.1)
        with pytest.raises(TimeoutError):
            client.recv(10)
        with connected(proxy) as late:
            late.sendall(b"three")
            proxy.restore()
            client.settimeout(5)
            assert client.recv(10) == b"two"
            assert late.recv(10) == b"three"


def test_a_cut_way_ends_connections_and_takes_none(proxy):
    with connected(proxy) as client:
        client.sendall(b"one")
        assert client.recv(10) == b"one"
        port = proxy.port
        proxy.cut()
        with contextlib.suppress(ConnectionResetError):
            assert client.recv(10) == b""
        with pytest.raises(ConnectionRefusedError), connected(proxy):
            pass
        proxy.restore()
    assert proxy.port == port
    with connected(proxy) as client:
        client.sendall(b"two")
        assert client.recv(10) == b"two"
