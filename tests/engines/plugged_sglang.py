"""SGLang with kvplug installed beside it, and the oracle that knows what it caches.

In:  settings that differ from the usual ones; is_stock leaves publishing to SGLang's own publisher.
Out: a recipe of a server that publishes; every sequence of tokens that it may have cached; and,
     when asked, the blocks that its tree holds.
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

ORACLE = Path(__file__).with_name("sglang_oracle_plugin")
BLOCK_SIZE, NUM_BLOCKS = 32, 64


def plugged_sglang(name, kind=None, *, is_stock=False, **more):
    """A recipe; `more` goes to PluggedSglang."""

    def make(folder):
        python = ensure_sglang()
        plugin = None if is_stock else ensure_plugin(python)
        return (kind or PluggedSglang)(python, ensure_tiny_model(python), plugin, folder, **more)

    return Recipe(name, make)


class PluggedSglang:
    """One server; env: what of its environment differs, how it makes its processes included."""

    def __init__(self, python, model_dir, plugin, folder, *, events=(), dp_size=1, env=FORKED):
        path = os.pathsep.join(str(each) for each in (plugin, ORACLE, START_PLUGIN) if each)
        self._oracle = folder / "oracle"
        cores = "|".join(str(rank) for rank in range(dp_size))  # SGLang wants to know, rank by rank
        bound = {"SGLANG_CPU_OMP_THREADS_BIND": cores} if dp_size > 1 else {}
        mine = {"PYTHONPATH": path, "ORACLE_SOCKET": str(self._oracle)}
        settings = SglangSettings(
            python=python,
            model_dir=model_dir,
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            plugin=plugin,
            extra_events_config=dict(events),
            extra_flags=("--dp-size", str(dp_size)),
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
                line.write(json.dumps(list(sequences)) + "\n")
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


def published_hashes(tokens, salt):
    """SGLang's names of full blocks in Dynamo's format, as unsigned numbers, by hashlib alone."""
    digest = b"" if salt is None else sha256(b"sglang-cache-salt-v1\0" + salt.encode())
    for first in range(0, len(tokens), BLOCK_SIZE):
        page = tokens[first : first + BLOCK_SIZE]
        digest = sha256(digest + struct.pack(f"<{len(page)}I", *page))
        yield int.from_bytes((digest if salt is None else in_namespace(salt, digest[:8]))[:8])


def in_namespace(salt, name):
    encoded = salt.encode()
    size = len(encoded).to_bytes(8, "little")
    seed = sha256(b"sglang-kv-event-namespace-v1" + b"\0" + b"\1" + size + encoded)
    return sha256(seed + name)


def sha256(content):
    return hashlib.sha256(content).digest()
