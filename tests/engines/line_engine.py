"""A real vLLM in a process of its own, asked by lines (vllm_on_lines.py), and a router after it."""

import json
import os
import subprocess
from pathlib import Path

from examples.launch.engine_env import ensure_tiny_model, ensure_vllm
from examples.launch.plugin_env import ensure_plugin
from examples.launch.ports import free_ports
from kvplug import Namespace, Rank, Tier
from kvplug.ingest.follower import Follower
from tests.engines.engine_pool import Recipe
from tests.engines.engine_start import START_PLUGIN
from tests.plugins.stock_client import wait_until

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("vllm_on_lines.py")
NUM_BLOCKS = 48


def line_engine(name, *, has_adapter=False, **more):
    """A recipe; `more` goes to LineEngine."""

    def make(folder):
        python = ensure_vllm()
        lora = folder / "adapter" if has_adapter else None
        return LineEngine(name, python, ensure_tiny_model(python), lora=lora, **more)

    return Recipe(name, make)


class LineEngine:
    """`ask` it, and let a router `follow` it."""

    def __init__(
        self, name, python, model_dir, *, hash_seed="0", lora=None, wire="vllm", env=(), **llm
    ):
        [self.port] = free_ports(1)
        self.name, self._lora = name, lora
        settings = {
            "model": str(model_dir),
            "port": self.port,
            "publisher": "zmq" if wire == "vllm" else "kvplug",
            "lora": lora and str(lora),
            "llm": {"num_gpu_blocks_override": NUM_BLOCKS, "dtype": "bfloat16", **llm},
        }
        self._command = [str(python), str(SCRIPT), json.dumps(settings)]
        plugin = [ensure_plugin(python)] if wire == "kvplug" else []
        path = os.pathsep.join(map(str, (*plugin, START_PLUGIN, ROOT)))
        mine = {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": path}
        self._env = {**os.environ, **mine, **dict(env)}
        self.last, self.blocks_of, self.offloaded = -1, {}, set()

    def start(self):
        pipe = subprocess.PIPE
        # Its end of the pipe is the lifeline: the engine ends when this process is gone.
        self._process = subprocess.Popen(
            self._command, env=self._env, stdin=pipe, stdout=pipe, text=True
        )

    def stop(self):
        self._process.stdin.close()
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()

    def wait_ready(self):
        assert self._answer() == {"ready": True}

    def ask(self, *prompts, **how):
        """Cached tokens of each prompt, as the engine counts them."""
        self._process.stdin.write(json.dumps({"prompts": prompts, **how}) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        self.last, self.blocks_of = answer["last"], {}
        self.offloaded = {name for _, name in answer["offloaded"]}
        for group, name in answer["blocks"]:
            self.blocks_of.setdefault(group, set()).add(name)
        self.generated = answer["generated"]
        return answer["cached"]

    def look(self):
        """Its blocks come with each answer."""

    @property
    def source(self):
        """Where its events come from, as arguments of EventThread.follow."""
        return (f"tcp://127.0.0.1:{self.port}",)

    @property
    def blocks(self):
        """Those of all KV cache groups."""
        return set().union(*self.blocks_of.values())

    def _answer(self):
        line = self._process.stdout.readline()
        assert line, f"{self.name} ended with {self._process.wait()}"
        return json.loads(line)


class Followed:
    """One engine as a worker of a router."""

    def __init__(self, engine, router, listener, *, hides_states=False):
        self.engine, self.router = engine, router
        self.rank = Rank(engine.name)
        self.follower = Follower(router, self.rank)
        self.follower.hides_states = hides_states
        self._unreachable = set()
        listener.follow(self.follower, *engine.source)
        wait_until(lambda: self.follower.connected, "the event stream is connected")

    def settle(self):
        """Wait until every message that the engine published is applied."""
        last = self.engine.last
        arrived = lambda: last < 0 or self.follower.sequencer.last == last  # noqa: E731
        wait_until(arrived, "every batch has arrived")

    def forget_adapter(self, lora):
        """The engine has loaded it again, and keeps blocks that no request can reach."""
        self.settle()
        before = self._held()
        self.router.forget_adapter(self.rank.worker, lora)
        self._unreachable |= before - self._held()

    def _held(self):
        return set(self.router.index_of(self.rank).engine_hashes_of(self.rank).tolist())

    def apart(self):
        """How many blocks only the engine has, and how many only the index."""
        self.settle()
        self.router.index_of(self.rank).check()
        blocks, held = self.engine.blocks - self._unreachable, self._held()
        return len(blocks - held), len(held - blocks)

    def apart_by_group(self):
        """How many blocks only the engine has, and how many only the index: by KV cache group on
        the device, and in host memory.
        """
        self.settle()
        index = self.router.index_of(self.rank)
        index.check()
        held = {
            group: set(index.engine_hashes_of(self.rank, group=group).tolist())
            for group in self.engine.blocks_of
        }
        apart = {
            group: (len(blocks - held[group] - self._unreachable), len(held[group] - blocks))
            for group, blocks in self.engine.blocks_of.items()
        }
        in_host = set(index.engine_hashes_of(self.rank, Tier.HOST).tolist())
        offloaded = self.engine.offloaded
        return apart | {"host memory": (len(offloaded - in_host), len(in_host - offloaded))}

    def decide(self, tokens, *, salt="", lora=""):
        """The router's decision, once it has seen every batch."""
        self.settle()
        namespace = Namespace(lora, salt)
        decision = self.router.route(tokens, workers=[self.rank.worker], namespace=namespace)
        self.router.finish(decision.request_id)
        return decision

    def predicted(self, tokens, **namespace):
        """What the router expects to be cached."""
        return predicted_tokens(self.decide(tokens, **namespace), len(tokens))

    def check_prediction(self, tokens, **namespace):
        """Returns the cached tokens, equal on both sides."""
        expected = self.predicted(tokens, **namespace)
        [cached] = self.engine.ask(tokens, **namespace)
        assert cached == expected, (cached, expected, namespace)
        return cached


def predicted_tokens(decision, num_tokens):
    """What an engine will report as cached; it always computes the last token itself."""
    most = (num_tokens - 1) // decision.block_size * decision.block_size
    return min(decision.cached_tokens, most)
