"""The engines of a run, by one face: simulated, vLLM and SGLang, with their stock publishers or
with kvplug's.

In:  what each is started with; wire: vllm for the stock stream, kvplug for our own.
Out: prompts are answered, the cache is emptied, the server is killed and started again; and what
it holds, by its own account, once all of its events are published.
"""

import os
import sys
from typing import NamedTuple

from examples.launch.child_process import ChildProcess
from examples.launch.endpoint import LOOPBACK, Endpoint
from examples.launch.ports import free_ports
from tests.chaos.asking import ask
from tests.engines.plugged_sglang import plugged_sglang
from tests.engines.plugged_vllm import plugged_vllm
from tests.plugins.stock_client import wait_until

BLOCK_SIZE, NUM_BLOCKS = 32, 64
_START_LIMIT_S = 60.0


class Held(NamedTuple):
    """The ids of the cached blocks, and the number of the last message published so far."""

    blocks: set
    last: int


def last_of(ask_oracle):
    """The number of the last message, once all batches are in messages."""
    numbers = iter(lambda: ask_oracle()["last"], object())
    return next(number for number in numbers if number is not None)


class SimEngine:
    """A simulated engine; the others have the same methods."""

    name = "simulated"

    def __init__(self, folder, *, buffer_steps, wire):
        http_port, events_port, replay_port = free_ports(3)
        self.events_endpoint = f"tcp://{LOOPBACK}:{events_port}"
        # Of a publisher of ours, the router is not told.
        replay_endpoint = f"tcp://{LOOPBACK}:{replay_port}"
        self.wire, self.replay_endpoint = wire, replay_endpoint if wire == "vllm" else None
        self._endpoint, self._oracle = Endpoint(http_port), folder / "oracle"
        flags = {
            "--port": http_port,
            "--events-endpoint": self.events_endpoint,
            "--replay-endpoint": replay_endpoint,
            "--wire": wire,
            "--topic": "kv@pod@simulated",
            "--buffer-steps": buffer_steps,
            "--block-size": BLOCK_SIZE,
            "--num-gpu-blocks": NUM_BLOCKS,
            "--max-model-len": 1024,
            "--prefill-tokens-per-s": 1e6,
            "--decode-base-s": 0.0001,
            "--decode-per-sequence-s": 0.0,
            "--step-overhead-s": 0.0001,
        }
        command = (sys.executable, "-m", "tests.chaos.sim_engine")
        self.process = ChildProcess(
            self.name,
            [*command, *(str(part) for flag in flags.items() for part in flag)],
            log_path=folder / "engine.log",
            env=os.environ | {"ORACLE_SOCKET": str(self._oracle)},
        )

    def start(self):
        self.process.start()

    def wait_ready(self):
        self.process.wait_until(
            self._endpoint.is_healthy, "take requests", timeout_s=_START_LIMIT_S
        )

    def stop(self):
        self.process.stop()

    def complete(self, prompts, *, max_tokens=1):
        body = {"prompt": prompts, "max_tokens": max_tokens}
        reply = self._endpoint.post("/v1/completions", body)
        assert reply.status == 200, reply

    def empty_cache(self):
        """Refused for as long as a request has blocks; published with the next step."""
        wait_until(
            lambda: self._endpoint.post("/reset_prefix_cache").body["success"], "it is empty"
        )

    def held(self):
        last = last_of(lambda: ask(self._oracle))
        return Held(set(ask(self._oracle)["blocks"]), last)


class VllmEngine:
    """Real vLLM."""

    name = "vLLM"

    def __init__(self, folder, *, buffer_steps, wire):
        is_stock, events = wire == "vllm", {"buffer_steps": buffer_steps}
        recipe = plugged_vllm(self.name, is_stock=is_stock, events=events)
        self._server = recipe.make(folder)
        self.wire, self.process = wire, self._server.process
        self.events_endpoint = f"tcp://{LOOPBACK}:{self._server.events_port}"
        replay_endpoint = f"tcp://{LOOPBACK}:{self._server.replay_port}"
        self.replay_endpoint = replay_endpoint if is_stock else None

    def start(self):
        self.process.start()

    def wait_ready(self):
        self._server.wait_ready()

    def stop(self):
        self.process.stop()

    def complete(self, prompts, *, max_tokens=1):
        self._server.complete(prompts, max_tokens=max_tokens)

    def empty_cache(self):
        """As the simulated engine does, which has it from here."""
        wait_until(self._server.reset_prefix_cache, "the cache is empty")

    def held(self):
        last = last_of(self._server.ask_oracle)
        return Held(set(self._server.ask_oracle()["blocks"]), last)


class SglangEngine:
    """Real SGLang."""

    name = "SGLang"

    def __init__(self, folder, *, buffer_steps, wire):
        is_stock, events = wire == "vllm", {"buffer_steps": buffer_steps}
        more = {} if is_stock else {"replay_endpoint": None}
        recipe = plugged_sglang(self.name, is_stock=is_stock, events=events | more)
        self._engine = recipe.make(folder)
        server = self._engine.server
        self.wire, self.process = wire, server.process
        self.events_endpoint = server.events_endpoint
        self.replay_endpoint = server.replay_endpoint if is_stock else None

    def start(self):
        self.process.start()

    def wait_ready(self):
        self._engine.wait_ready()

    def stop(self):
        self.process.stop()

    def complete(self, prompts, *, max_tokens=1):
        self._engine.generate(prompts, max_tokens=max_tokens)

    def empty_cache(self):
        self._engine.server.empty_cache()

    def held(self):
        # It publishes when it becomes idle, a moment after its last answer.
        num_drains = self._engine.ask_oracle()["num_drains"]
        wait_until(
            lambda: self._engine.ask_oracle()["num_drains"] >= num_drains + 2, "all is published"
        )
        blocks = self._engine.cached_blocks()
        return Held(blocks, last_of(self._engine.ask_oracle))


ENGINES = {"sim": SimEngine, "vllm": VllmEngine, "sglang": SglangEngine}
