"""Real nats-server processes for tests: one node, or three of a cluster, to be killed and paused.

In:  how many, further lines of their configuration.   Out: nodes, on ports that were free.
"""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from kvplug.nats.server import binary

_START_TIMEOUT_S = 20.0


class Node:
    """url; start, kill, pause, resume, stop. A node that starts again has its port and store."""

    def __init__(self, folder: Path, name: str, ports: list[int], more: str) -> None:
        self.name, self.folder = name, folder
        self.port, self.monitor_port, self.route_port = ports
        self.store = folder / name
        self.log = folder / f"{name}.log"
        self.config = folder / f"{name}.conf"
        self.config.write_text(
            f"server_name: {name}\nlisten: 127.0.0.1:{self.port}\n"
            f"http: 127.0.0.1:{self.monitor_port}\n"
            f'jetstream {{ store_dir: "{self.store}", max_mem: 2G, max_file: 20G }}\n{more}\n'
        )
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def start(self, *, wait: bool = True) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [str(binary()), "-c", str(self.config)], stdout=log, stderr=log
            )
        if wait:
            self.await_ready()

    def await_ready(self) -> None:
        """JetStream is there; of a cluster, the other nodes may not be."""
        url = f"http://127.0.0.1:{self.monitor_port}/healthz?js-enabled-only=true"
        deadline = time.monotonic() + _START_TIMEOUT_S
        while True:
            with suppress(OSError):
                urllib.request.urlopen(url, timeout=1).close()
                return
            assert self.process is not None
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"{self.name} did not start: {self.log.read_text()[-2000:]}")
            time.sleep(0.02)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def pause(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        if self.process is None or self.process.poll() is not None:
            return
        self.resume()
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.kill()


def free_ports(num_ports: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(num_ports)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@contextmanager
def nats_servers(num_nodes: int = 1, more: str = "", *, prepare=None):
    """Nodes that run; their folder is removed at the end. Three are a cluster, whose leader needs
    some seconds before streams can be made; clients are not told of each other's nodes.

    prepare: a context manager of each node's store, from before its start to after its end.
    """
    folder = Path(tempfile.mkdtemp(prefix="kvplug-nats-"))
    ports = [free_ports(3) for _ in range(num_nodes)]
    routes = ", ".join(f"nats-route://127.0.0.1:{each[2]}" for each in ports)
    nodes = []
    for number, each in enumerate(ports):
        cluster = (
            f"cluster {{ name: tests, listen: 127.0.0.1:{each[2]}, no_advertise: true, "
            f"routes: [{routes}] }}\n"
        )
        lines = (cluster if num_nodes > 1 else "") + more
        nodes.append(Node(folder, f"n{number}", each, lines))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        if prepare is not None:
            for node in nodes:
                stack.enter_context(prepare(node.store))
        for node in nodes:
            stack.callback(node.stop)
            node.start(wait=False)
        for node in nodes:
            node.await_ready()
        yield nodes
