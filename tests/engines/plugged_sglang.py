"""SGLang with kvplug installed beside it, and the oracle that knows what it caches.

In:  settings that differ from the usual ones; is_stock leaves publishing to SGLang's own publisher.
Out: a recipe of a server that publishes; every sequence of tokens that it may have cached; and,
     when asked, the blocks that its tree holds, by tier if wanted.
"""

import hashlib
import json
import os
import socket
import struct
from pathlib import Path

from examples.launch.endpoint import Endpoint
from examples.launch.engine_env import ensure_tiny_model
from examples.launch.plugin_env import ensure_plugin
from examples.launch.sglang_env import ensure_sglang
from examples.launch.sglang_server import SglangServer, SglangSettings
from tests.engines.engine_pool import Recipe
from tests.engines.engine_start import FORKED, START_PLUGIN
from tests.plugins.stock_client import wait_until

ORACLE = Path(__file__).with_name("sglang_oracle_plugin")
CPU_PLUGIN = Path(__file__).with_name("sglang_cpu_plugin")
BLOCK_SIZE, NUM_BLOCKS = 32, 64
WITHOUT_WEIGHTS = ("--load-format", "dummy", "--skip-tokenizer-init")
# Its kernels are for GPUs; what copies instead is in sglang_cpu_plugin.
HICACHE = (
    *("--enable-hierarchical-cache", "--hicache-ratio", "2"),
    *("--hicache-write-policy", "write_through", "--hicache-io-backend", "direct"),
    *("--hicache-mem-layout", "layer_first"),
)


def plugged_sglang(name, kind=None, *, is_stock=False, save_model=None, **more):
    """A recipe; save_model(folder): another model than the tiny one, without weights; `more` goes
    to PluggedSglang.
    """

    def make(folder):
        python = ensure_sglang()
        plugin = None if is_stock else ensure_plugin(python)
        model_dir = save_model(folder / "model") if save_model else ensure_tiny_model(python)
        return (kind or PluggedSglang)(python, model_dir, plugin, folder, **more)

    return Recipe(name, make)


class PluggedSglang:
    """One server; env: what of its environment differs, how it makes its processes included."""

    def __init__(
        self,
        python,
        model_dir,
        plugin,
        folder,
        *,
        events=(),
        dp_size=1,
        env=FORKED,
        flags=(),
        plugins=(),
        num_blocks=NUM_BLOCKS,
    ):
        all_plugins = (plugin, ORACLE, START_PLUGIN, *plugins)
        path = os.pathsep.join(str(each) for each in all_plugins if each)
        self._oracle = folder / "oracle"
        cores = "|".join(str(rank) for rank in range(dp_size))  # SGLang wants to know, rank by rank
        bound = {"SGLANG_CPU_OMP_THREADS_BIND": cores} if dp_size > 1 else {}
        mine = {"PYTHONPATH": path, "ORACLE_SOCKET": str(self._oracle)}
        settings = SglangSettings(
            python=python,
            model_dir=model_dir,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            plugin=plugin,
            extra_events_config=dict(events),
            extra_flags=("--dp-size", str(dp_size), *flags),
            extra_env={**bound, **mine, **dict(env)},
        )
        self.server = SglangServer("sglang", settings, log_dir=folder)
        self.endpoint = Endpoint(int(self.server.url.rpartition(":")[2]))
        self.sequences = set()

    def start(self):
        self.server.start()

    def wait_ready(self):
        self.server.wait_ready()

    def stop(self):
        self.server.stop()

    def log(self):
        return self.server.log_path.read_text(errors="replace")

    def generate(self, prompts, *, max_tokens=1, salt=None):
        """Answer several prompts that start together; how many tokens of each were cached."""
        sampling = {"max_new_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": prompts, "sampling_params": sampling}
        if salt is not None:
            body["cache_salt"] = salt
        reply = self.endpoint.post("/generate", body, timeout_s=120)
        assert reply.status == 200, reply
        for prompt, answer in zip(prompts, reply.body, strict=True):
            self.sequences.add(((*prompt, *answer["output_ids"]), salt))
        return [answer["meta_info"]["cached_tokens"] for answer in reply.body]

    def ask_oracle(self, sequences=(), *, rank=0):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(30)
            connection.connect(f"{self._oracle}.{rank}")
            with connection.makefile("rw") as line:
                is_list = sequences and not isinstance(sequences, str)
                line.write(json.dumps(list(sequences) if is_list else sequences) + "\n")
                line.flush()
                return json.loads(line.read())

    def cached_blocks(self, rank=0):
        """The names of the blocks that a tree holds; fails if it holds others as well."""
        asked = sorted(self.sequences, key=repr)
        answer = self.ask_oracle(asked, rank=rank)
        blocks = set()
        for (tokens, salt), num_held in zip(asked, answer["held"], strict=True):
            assert num_held % BLOCK_SIZE == 0
            blocks.update(published_hashes(tokens[:num_held], salt))
        assert answer["num_slots"] == len(blocks) * BLOCK_SIZE
        return blocks

    def cached_by_tier(self, rank=0):
        """The names of the blocks on the device and of those in host memory."""
        answer = self.ask_oracle(None, rank=rank)
        names = {}
        for tokens, salt in self.sequences:
            hashes = published_hashes(tokens, salt)
            names.update(zip(stored_digests(tokens, salt), hashes, strict=True))
        return [{names[digest] for digest in answer[tier]} for tier in ("device", "host")]


def drain(engine, rank=0):
    """Wait until the engine has published what it did; returns in how many batches."""
    num_drains = engine.ask_oracle(rank=rank)["num_drains"]

    def has_drained():
        # Wakes it up: an idle one looks around once a second.
        engine.endpoint.get("/server_info", timeout_s=60)
        # One may be under way; the next begins after the last answer was given.
        return engine.ask_oracle(rank=rank)["num_drains"] >= num_drains + 2

    wait_until(has_drained, "all is published")
    return engine.ask_oracle(rank=rank)["num_batches"]


def last_message(engine, rank=0):
    """The number of the last message of the stream, once all that the engine did is in messages."""
    drain(engine, rank)
    numbers = iter(lambda: engine.ask_oracle(rank=rank)["last"], object())
    return next(number for number in numbers if number is not None)


def published_hashes(tokens, salt):
    """SGLang's names of full blocks in Dynamo's format, as unsigned numbers, by hashlib alone."""
    seed = b"" if salt is None else sha256(b"sglang-cache-salt-v1\0" + salt.encode())
    for digest in chain_of(tokens, seed):
        yield int.from_bytes((digest if salt is None else in_namespace(salt, digest[:8]))[:8])


def stored_digests(tokens, salt):
    """What SGLang's tree itself has of full blocks, in hex."""
    seed = b"" if salt is None else sha256(b"sglang-cache-namespace-v1\0" + counted(salt))
    return (digest.hex() for digest in chain_of(tokens, seed))


def chain_of(tokens, seed):
    digest = seed
    for first in range(0, len(tokens), BLOCK_SIZE):
        page = tokens[first : first + BLOCK_SIZE]
        digest = sha256(digest + struct.pack(f"<{len(page)}I", *page))
        yield digest


def in_namespace(salt, name):
    return sha256(sha256(b"sglang-kv-event-namespace-v1\0" + counted(salt)) + name)


def counted(salt):
    encoded = salt.encode()
    return b"\1" + len(encoded).to_bytes(8, "little") + encoded


def sha256(content):
    return hashlib.sha256(content).digest()
