"""`vllm serve` with kvplug installed beside it, and the oracle that knows what it caches.

In:  settings that differ from the usual ones; is_stock leaves publishing to vLLM's own publisher.
Out: a recipe of an OpenAI server that publishes, and that tells per rank what its block pool holds.
"""

import json
import os
import socket
from pathlib import Path

from examples.launch.child_process import ChildProcess
from examples.launch.endpoint import LOOPBACK, Endpoint
from examples.launch.engine_env import ensure_tiny_model, ensure_vllm
from examples.launch.plugin_env import ensure_plugin
from examples.launch.ports import free_ports
from examples.launch.vllm_server import ENGINE_ENV, FOREIGN_ENV
from tests.engines.engine_pool import Recipe
from tests.engines.engine_start import FORKED, START_PLUGIN

ORACLE = Path(__file__).with_name("oracle_plugin")
MODEL, BLOCK_SIZE, START_LIMIT_S = "tiny-llama", 32, 300.0


def plugged_vllm(name, kind=None, *, is_stock=False, **more):
    """A recipe; `more` goes to PluggedVllm."""

    def make(folder):
        python = ensure_vllm()
        plugin = None if is_stock else ensure_plugin(python)
        return (kind or PluggedVllm)(python, ensure_tiny_model(python), plugin, folder, **more)

    return Recipe(name, make)


class PluggedVllm:
    """One server; env: what of its environment differs, how it makes its processes included."""

    def __init__(self, python, model_dir, plugin, folder, *, events=(), flags=(), env=FORKED):
        http_port, self.events_port, self.replay_port = free_ports(3)
        self._endpoint, self._folder = Endpoint(http_port), folder
        self.url = f"http://{LOOPBACK}:{http_port}"
        config = {
            "enable_kv_cache_events": True,
            **(self._stock_events() if plugin is None else self._kvplug_events()),
            "topic": f"kv@pod@{MODEL}",
            **dict(events),
        }
        command = [
            *(str(python), "-m", "vllm.entrypoints.cli.main", "serve", str(model_dir)),
            *("--served-model-name", MODEL, "--host", LOOPBACK, "--port", str(http_port)),
            *("--dtype", "float16", "--enforce-eager", "--max-model-len", "1024"),
            *("--block-size", str(BLOCK_SIZE), "--num-gpu-blocks-override", "64"),
            *("--max-num-seqs", "16", "--kv-events-config", json.dumps(config), *flags),
        ]
        self.process = ChildProcess(
            "vllm-serve", command, log_path=folder / "vllm.log", env=self._env(plugin, dict(env))
        )

    def _kvplug_events(self):
        return {"publisher": "kvplug", "endpoint": f"tcp://{LOOPBACK}:{self.events_port}"}

    def _stock_events(self):
        # vLLM 0.32's own publisher binds a tcp endpoint only if it holds a `*`.
        return {
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self.events_port}",
            "replay_endpoint": f"tcp://*:{self.replay_port}",
        }

    def _env(self, plugin, more):
        inherited = {k: v for k, v in os.environ.items() if k not in FOREIGN_ENV}
        path = os.pathsep.join(str(each) for each in (plugin, ORACLE, START_PLUGIN) if each)
        mine = {"PYTHONPATH": path, "ORACLE_SOCKET": str(self._folder / "oracle")}
        return inherited | ENGINE_ENV | mine | more

    def start(self):
        self.process.start()

    def wait_ready(self):
        self.process.wait_until(self._endpoint.is_healthy, "take requests", timeout_s=START_LIMIT_S)

    def stop(self):
        self.process.stop()

    def log(self):
        return self.process.log_path.read_text(errors="replace")

    def complete(self, prompts, *, max_tokens=1, timeout_s=120.0):
        """Answer one prompt of token ids, or several in one request: those start together."""
        body = {"model": MODEL, "prompt": prompts, "max_tokens": max_tokens, "ignore_eos": True}
        reply = self._endpoint.post("/v1/completions", body, timeout_s=timeout_s)
        assert reply.status == 200, reply
        return reply.body

    def reset_prefix_cache(self):
        """Whether the cache is empty now; not while a request still holds blocks."""
        return self._endpoint.post("/reset_prefix_cache").body["success"]

    def event_sources(self):
        return self._endpoint.get("/kv_event_sources").body

    def ask_oracle(self, rank=0):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(30)
            connection.connect(str(self._folder / f"oracle.{rank}"))
            with connection.makefile() as answer:
                return json.loads(answer.read())
