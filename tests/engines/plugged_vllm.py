"""`vllm serve` with kvplug installed beside it, and the oracle that knows what it caches.

In:  an interpreter that has vLLM, a model's folder, a folder with kvplug installed (None leaves
     publishing to vLLM's own publisher).
Out: an OpenAI server that publishes, and per rank its block pool when asked.
"""

import json
import os
import shutil
import socket
import subprocess
from pathlib import Path

from examples.launch.child_process import ChildProcess
from examples.launch.endpoint import LOOPBACK, Endpoint
from examples.launch.ports import free_ports
from examples.launch.vllm_server import ENGINE_ENV, FOREIGN_ENV

ROOT = Path(__file__).parents[2]
ORACLE = Path(__file__).with_name("oracle_plugin")
MODEL, BLOCK_SIZE, START_LIMIT_S = "tiny-llama", 32, 300.0


def install_kvplug(python, folder):
    """What `pip install kvplug` would put beside vLLM, in a folder of its own."""
    source, target = folder / "source", folder / "target"
    shutil.copytree(ROOT / "kvplug", source / "kvplug")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    # Without isolation, so that nothing is downloaded: vLLM's environment has setuptools.
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    env = {name: value for name, value in os.environ.items() if name not in FOREIGN_ENV}
    command = [python, "-m", "pip", "install", *options, "--target", target, source]
    subprocess.run(command, check=True, timeout=300, env=env)
    return target


class PluggedVllm:
    """One server; a context manager that waits until it serves and stops it at the end."""

    def __init__(self, python, model_dir, plugins, folder, *, events=(), flags=(), env=()):
        http_port, self.events_port, self.replay_port = free_ports(3)
        self._endpoint, self._folder = Endpoint(http_port), folder
        config = {
            "enable_kv_cache_events": True,
            **(self._stock_events() if plugins is None else self._kvplug_events()),
            "topic": f"kv@pod@{MODEL}",
            **dict(events),
        }
        command = [
            *(str(python), "-m", "vllm.entrypoints.cli.main", "serve", str(model_dir)),
            *("--served-model-name", MODEL, "--host", LOOPBACK, "--port", str(http_port)),
            *("--dtype", "bfloat16", "--enforce-eager", "--max-model-len", "1024"),
            *("--block-size", str(BLOCK_SIZE), "--num-gpu-blocks-override", "64"),
            *("--max-num-seqs", "16", "--kv-events-config", json.dumps(config), *flags),
        ]
        self.process = ChildProcess(
            "vllm-serve", command, log_path=folder / "vllm.log", env=self._env(plugins, dict(env))
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

    def _env(self, plugins, more):
        inherited = {k: v for k, v in os.environ.items() if k not in FOREIGN_ENV}
        path = os.pathsep.join(str(folder) for folder in (plugins, ORACLE) if folder)
        mine = {"PYTHONPATH": path, "ORACLE_SOCKET": str(self._folder / "oracle")}
        return inherited | ENGINE_ENV | mine | more

    def __enter__(self):
        self.process.start()
        try:
            self.process.wait_until(
                self._endpoint.is_healthy, "take requests", timeout_s=START_LIMIT_S
            )
        except BaseException:
            self.process.stop()
            raise
        return self

    def __exit__(self, *_):
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
