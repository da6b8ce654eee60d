"""The engines of a run by one face: programs that publish a cache, or real vLLM.

In:  URLs of NATS servers.   Out: work by order, what the engine holds by its own account.
"""

import http.client
import sys
import threading
from contextlib import suppress

from examples.launch.child_process import ChildProcess
from examples.launch.ports import free_ports
from tests.chaos.asking import ask
from tests.chaos.workload import Workload
from tests.chaos_cluster import publishing_engine
from tests.chaos_cluster.operating import FLEET
from tests.engines.plugged_vllm import BLOCK_SIZE, FORKED, plugged_vllm
from tests.plugins.stock_client import wait_until

_PER_S = 40
# Of the workload of real engines, some of them in one message.
_EVENTS_A_ROUND = 8


class PublishingEngine:
    """A program that publishes a cache; engines with the same url are namesakes."""

    kind = "publisher"
    block_size = publishing_engine.BLOCK_SIZE

    def __init__(self, name, folder, urls, *, url=None, seed=1):
        self.name, self.url = name, url or f"http://127.0.0.1:{free_ports(1)[0]}"
        self._socket = folder / name
        flags = {
            "--servers": ",".join(urls),
            "--fleet": FLEET,
            "--name": self.url,
            "--seed": seed,
            "--socket": self._socket,
        }
        given = (str(part) for flag in flags.items() for part in flag)
        command = [sys.executable, "-m", "tests.chaos_cluster.publishing_engine", *given]
        self.process = ChildProcess(name, command, log_path=folder / f"{name}.log")

    def start(self):
        self._socket.unlink(missing_ok=True)
        self.process.start()

    def wait_ready(self):
        wait_until(self._socket.is_socket, f"{self.name} answers")

    def kill(self):
        self.process.kill()
        self._socket.unlink(missing_ok=True)

    def stop(self):
        self.process.stop()

    def begin_work(self):
        ask(self._socket, ["rate", _PER_S])

    def end_work(self):
        """Nothing more is published when this returns."""
        ask(self._socket, ["rate", 0])

    def work(self, num_events):
        ask(self._socket, ["burst", num_events])

    def held(self):
        """Nothing once it is dead; None if it cannot say."""
        with suppress(OSError, ValueError):
            return set(ask(self._socket, "held"))
        return None if self.process.members() else set()


class VllmEngine:
    """Real vLLM with kvplug's plug-in."""

    kind = "vLLM"
    block_size = BLOCK_SIZE

    def __init__(self, name, folder, urls, *, url=None, seed=1):
        folder = folder / name
        folder.mkdir()
        said = {"KVPLUG_NATS": ",".join(urls), "KVPLUG_NATS_FLEET": FLEET}
        said |= {} if url is None else {"KVPLUG_NATS_WORKER": url}
        self._server = plugged_vllm(name, env=FORKED | said).make(folder)
        self.name, self.url = name, url or self._server.url
        self.process = self._server.process
        self._workload = Workload(self, seed)
        self._is_working, self._thread = threading.Event(), None

    def start(self):
        self.process.start()

    def wait_ready(self):
        self._server.wait_ready()

    def kill(self):
        self._is_working.clear()
        self.process.kill()
        self._join()

    def stop(self):
        self._is_working.clear()
        self.process.stop()

    def complete(self, prompts, *, max_tokens=1):
        self._server.complete(prompts, max_tokens=max_tokens)

    def begin_work(self):
        self._is_working.set()
        self._thread = threading.Thread(target=self._work_on, daemon=True)
        self._thread.start()

    def _work_on(self):
        while self._is_working.is_set():
            try:
                self._workload.round()
            except (OSError, http.client.HTTPException, AssertionError):
                if self._is_working.is_set():  # it is not being killed
                    raise

    def end_work(self):
        self._join()

    def _join(self):
        self._is_working.clear()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def work(self, num_events):
        for _ in range(num_events // _EVENTS_A_ROUND):
            self._workload.round()

    def held(self):
        with suppress(OSError, ValueError):
            return set(self._server.ask_oracle()["blocks"])
        return None if self.process.members() else set()


ENGINES = {"sim": PublishingEngine, "vllm": VllmEngine}
