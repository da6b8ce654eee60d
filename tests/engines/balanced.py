"""vLLM and SGLang with two data-parallel ranks, as a user starts them: nothing about events.

In:  whether kvplug balances them, the size of their caches.
Out: an OpenAI server; what it reports of each request; its log.
"""

import os
import subprocess

from examples.launch.child_process import ChildProcess
from examples.launch.endpoint import LOOPBACK, Endpoint
from examples.launch.engine_env import ensure_tiny_model, ensure_vllm
from examples.launch.plugin_env import ensure_plugin
from examples.launch.ports import free_ports
from examples.launch.sglang_env import ensure_sglang
from examples.launch.sglang_server import ENGINE_ENV as SGLANG_ENV
from examples.launch.vllm_server import ENGINE_ENV as VLLM_ENV
from examples.launch.vllm_server import FOREIGN_ENV
from tests.engines.engine_pool import Recipe
from tests.engines.engine_start import FORKED, START_PLUGIN
from tests.plugins.stock_client import wait_until

MODEL, BLOCK_SIZE, NUM_RANKS, START_LIMIT_S = "tiny-llama", 32, 2, 400.0
READY = "chooses the data-parallel rank"


def balanced(name, kind, **more):
    """A recipe of a server; `more` goes to its class."""
    return Recipe(name, lambda folder: kind(folder, **more))


class _Server:
    def __init__(self, folder, *, balances=True, num_blocks=64, flags=(), env=()):
        [port] = free_ports(1)
        self.endpoint, self.balances = Endpoint(port), balances
        command = [*self._command(port, num_blocks), *flags]
        self.process = ChildProcess(
            self.name, command, log_path=folder / f"{self.name}.log", env=self._env() | dict(env)
        )

    def _env(self):
        inherited = {k: v for k, v in os.environ.items() if k not in FOREIGN_ENV}
        path = os.pathsep.join(map(str, (ensure_plugin(self._python()), START_PLUGIN)))
        balance = {"KVPLUG_BALANCE": "kv"} if self.balances else {}
        return inherited | self.engine_env | FORKED | {"PYTHONPATH": path} | balance

    def start(self):
        if self.balances:  # the kernels, which take minutes while engines start
            warming = [str(self._python()), "-m", "kvplug.dp_balancing.warming"]
            subprocess.run(warming, check=True, env=self._env(), timeout=START_LIMIT_S)
        self.process.start()

    def wait_ready(self):
        self.process.wait_until(self.endpoint.is_healthy, "take requests", timeout_s=START_LIMIT_S)
        if self.balances:
            ready = lambda: self.log().count(READY) >= self.num_choosers  # noqa: E731
            wait_until(ready, "kvplug chooses", timeout_s=300)

    def stop(self):
        self.process.stop()

    def empty_cache(self):
        """Of all ranks; not while a request still holds blocks."""

        def is_emptied():
            return self.endpoint.post(self.reset_path, timeout_s=60).status == 200

        wait_until(is_emptied, "the caches are empty")

    def log(self):
        return self.process.log_path.read_text(errors="replace")


class BalancedVllm(_Server):
    """By default with as many front ends as ranks."""

    name, engine_env, reset_path = "vllm", VLLM_ENV, "/reset_prefix_cache"

    def __init__(self, folder, *, num_front_ends=NUM_RANKS, flags=(), **more):
        self.num_choosers = num_front_ends
        count = () if num_front_ends == NUM_RANKS else ("--api-server-count", str(num_front_ends))
        super().__init__(folder, flags=(*count, *flags), **more)

    _python = staticmethod(ensure_vllm)

    def _command(self, port, num_blocks):
        python = self._python()
        return [
            *(str(python), "-m", "vllm.entrypoints.cli.main", "serve"),
            *(str(ensure_tiny_model(python)), "--served-model-name", MODEL),
            *("--host", LOOPBACK, "--port", str(port), "--dtype", "float16", "--enforce-eager"),
            *("--max-model-len", "1024", "--block-size", str(BLOCK_SIZE), "--max-num-seqs", "16"),
            *("--num-gpu-blocks-override", str(num_blocks), "--enable-prompt-tokens-details"),
            *("--data-parallel-size", str(NUM_RANKS)),
        ]

    def complete(self, prompt, *, max_tokens=1, rank=None, **fields):
        """Answer token ids; how many of them were cached."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
        headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
        reply = self.endpoint.post("/v1/completions", body | fields, timeout_s=120, headers=headers)
        assert reply.status == 200, reply
        details = reply.body["usage"]["prompt_tokens_details"]
        return 0 if details is None else details["cached_tokens"]


class BalancedSglang(_Server):
    """Its data-parallel controller is one process."""

    name, engine_env = "sglang", SGLANG_ENV | {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    reset_path = "/flush_cache"
    num_choosers = 1

    _python = staticmethod(ensure_sglang)

    def _command(self, port, num_blocks):
        python = self._python()
        return [
            *(str(python), "-m", "sglang.launch_server", "--model-path"),
            *(str(ensure_tiny_model(python)), "--served-model-name", MODEL),
            *("--host", LOOPBACK, "--port", str(port), "--device", "cpu", "--dtype", "bfloat16"),
            *("--attention-backend", "torch_native", "--context-length", "1024"),
            *("--page-size", str(BLOCK_SIZE), "--max-running-requests", "16"),
            *("--max-total-tokens", str(num_blocks * BLOCK_SIZE), "--dp-size", str(NUM_RANKS)),
            *("--disable-overlap-schedule", "--skip-server-warmup", "--sleep-on-idle"),
            "--enable-cache-report",
        ]

    def complete(self, prompt, *, max_tokens=1, rank=None, **fields):
        """Answer token ids; how many of them were cached."""
        sampling = {"max_new_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling, **fields}
        if rank is not None:
            body["routed_dp_rank"] = rank
        reply = self.endpoint.post("/generate", body, timeout_s=120)
        assert reply.status == 200, reply
        return reply.body["meta_info"]["cached_tokens"]
