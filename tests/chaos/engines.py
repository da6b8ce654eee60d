"""The engines of a run, by one face: simulated, vLLM and SGLang, with their stock publishers.

In:  what each is started with.
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
    """The ids of the cached blocks, and the number of batches published so far."""

    blocks: set
    num_batches: int


class SimEngine:
    """A simulated engine; the others have the same methods."""

    name = "simulated"

    def __init__(self, folder, *, buffer_steps):
        http_port, events_port, replay_port = free_ports(3)
        self.events_endpoint = f"tcp://{LOOPBACK}:{events_port}"
        self.replay_endpoint = f"tcp://{LOOPBACK}:{replay_port}"
        self._endpoint, self._oracle = Endpoint(http_port), folder / "oracle"
        flags = {
            "--port": http_port,
            "--events-endpoint": self.events_endpoint,
            "--replay-endpoint": self.replay_endpoint,
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
        answer = ask(self._oracle)
        return Held(set(answer["blocks"]), answer["num_batches"])


class VllmEngine:
    """Real vLLM."""

    name = "vLLM"

    def __init__(self, folder, *, buffer_steps):
        recipe = plugged_vllm(self.name, is_stock=True, events={"buffer_steps": buffer_steps})
        self._server = recipe.make(folder)
        self.process = self._server.process
        self.events_endpoint = f"tcp://{LOOPBACK}:{self._server.events_port}"
        self.replay_endpoint = f"tcp://{LOOPBACK}:{self._server.replay_port}"

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
        answer = self._server.ask_oracle()
        return Held(set(answer["blocks"]), answer["num_batches"])


class SglangEngine:
    """Real SGLang."""

    name = "SGLang"

    def __init__(self, folder, *, buffer_steps):
        recipe = plugged_sglang(self.name, is_stock=True, events={"buffer_steps": buffer_steps})
        self._engine = recipe.make(folder)
        server = self._engine.server
        self.process = server.process
        self.events_endpoint = server.events_endpoint
        self.replay_endpoint = server.replay_endpoint

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
        return Held(blocks, self._engine.ask_oracle()["num_batches"])


ENGINES = {"sim": SimEngine, "vllm": VllmEngine, "sglang": SglangEngine}
