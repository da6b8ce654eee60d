"""A replica of a run: a process to be killed, paused and cut off, and what it knows.

In:  its ways to the servers, the engines' URLs.   Out: what it has of each engine.
"""

import json
import signal
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from urllib.request import urlopen

from examples.launch.child_process import ChildProcess
from examples.launch.ports import free_ports
from tests.chaos.asking import ask
from tests.chaos_cluster.operating import FLEET

_START_LIMIT_S = 240.0
# One that has paused itself does not answer.
_LOOK_LIMIT_S = 3.0


class Replica:
    """start, kill, pause, resume, stop; look, counters, health; `ways`: a proxy per server."""

    def __init__(self, name, folder, ways, engine_urls, block_size, *, num_copies):
        self.name, self.ways = name, ways
        self._socket, self.port = folder / f"replica-{name}", free_ports(1)[0]
        self.num_starts, self.is_paused = 0, False
        self._counted = Counter()  # by processes that are no more
        self._latest = Counter()
        self._flags = [
            *(part for url in engine_urls for part in ("--worker", url)),
            *("--port", str(self.port), "--router-id", name, "--log-level", "info"),
            *("--nats", ",".join(way.url for way in ways), "--nats-fleet", FLEET),
            *("--nats-replicas", str(num_copies), "--block-size", str(block_size)),
            "--router-replica-sync",
        ]
        self._log = folder / f"replica-{name}.log"

    def start(self, *more):
        """With further flags."""
        self._socket.unlink(missing_ok=True)
        self.num_starts += 1
        self._counted, self._latest = self.counters, Counter()
        module = "tests.chaos_cluster.replica_program"
        command = [sys.executable, "-m", module, str(self._socket), *self._flags, *more]
        self.process = ChildProcess(self.name, command, log_path=self._log)
        self.process.start()

    def wait_ready(self):
        self.process.wait_until(self._socket.is_socket, "answer", timeout_s=_START_LIMIT_S)

    def kill(self):
        self.process.kill()
        self._socket.unlink(missing_ok=True)

    def stop(self):
        self.resume()
        self.process.stop()

    def pause(self):
        self.is_paused = True
        self.process._signal_group(signal.SIGSTOP)

    def resume(self):
        if self.is_paused:
            self.process._signal_group(signal.SIGCONT)
        self.is_paused = False

    def cut(self):
        for way in self.ways:
            way.cut()

    def stall(self):
        for way in self.ways:
            way.stall()

    def restore(self):
        for way in self.ways:
            way.restore()

    def arm(self, step, number):
        """At this step of its next snapshot it sends itself the signal; None disarms."""
        ask(self._socket, ["at", step, int(number)])

    @property
    def is_dead(self):
        return self.process.exit_status is not None

    @property
    def is_stopped(self):
        """Whether it has paused itself."""
        states = [Path(f"/proc/{pid}/stat").read_text() for pid in self.process.members()]
        return any(each.rpartition(")")[2].split()[0] == "T" for each in states)

    @property
    def is_here(self):
        """Whether it can be asked now."""
        return not self.is_paused and not self.is_dead and self._socket.is_socket()

    def look(self):
        """By worker URL: level, reason, fix, blocks; None if it is not here."""
        if not self.is_here:
            return None
        with suppress(OSError, ValueError):
            said = ask(self._socket, "look", limit_s=_LOOK_LIMIT_S)
            counted = (Counter(seen["counters"]) for seen in said.values())
            self._latest = sum(counted, Counter())
            return {name.rpartition("/")[0]: seen for name, seen in said.items()}
        return None

    @property
    def counters(self):
        """Sums over all ranks, and over all processes that this replica has been; of the last look
        at each.
        """
        return self._counted + self._latest

    def check(self):
        assert ask(self._socket, "check") is True

    def health(self):
        with urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5) as answer:
            return json.load(answer)

    def log(self):
        return self._log.read_text(errors="replace")
