"""The router of a run in a process of its own, so that it can be killed.

In:  an engine, the proxy before it.   Out: what the router trusts and what its index has.
"""

import sys

from examples.launch.child_process import ChildProcess
from tests.chaos.asking import ask
from tests.plugins.stock_client import wait_until


class RouterProcess:
    """A context manager; kill_and_restart is what it is for."""

    def __init__(self, events, replay, block_size, folder):
        self._socket = folder / "router"
        flags = {
            "--events": events,
            "--replay": replay,
            "--block-size": block_size,
            "--socket": self._socket,
        }
        given = (str(part) for flag in flags.items() if flag[1] is not None for part in flag)
        command = [sys.executable, "-m", "tests.chaos.following_router", *given]
        self.process = ChildProcess("router", command, log_path=folder / "router.log")

    def __enter__(self):
        self._start()
        return self

    def __exit__(self, *_):
        self.process.kill()

    def kill_and_restart(self):
        """SIGKILL, then a new incarnation that knows nothing."""
        self.process.kill()
        self._start()

    def state(self):
        return ask(self._socket, "state")

    def blocks(self):
        return set(ask(self._socket, "blocks"))

    def _start(self):
        self._socket.unlink(missing_ok=True)
        self.process.start()
        wait_until(self._socket.is_socket, "the router answers")
