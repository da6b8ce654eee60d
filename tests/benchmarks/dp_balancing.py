"""Two data-parallel ranks, balanced by the engine itself or by kvplug inside it.

usage: python -m tests.benchmarks.dp_balancing [--rounds 3] [--only vllm,sglang]

In:  real vLLM and SGLang on the CPU with a tiny model, two ranks each; the same requests in the
     same order for both ways.
Out: a table, one line of JSON, and bench-results/balancing.json.

The requests: questions about 12 documents of 2048 tokens, in random order, at random times in an
open loop. The cache of one rank has room for 7 of the documents, both have room for all. Two
servers take turns, round by round; the one whose turn it is not is stopped (SIGSTOP), as SGLang's
data-parallel controller spins while it waits.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median

import aiohttp

from tests.engines.balanced import MODEL, BalancedSglang, BalancedVllm

ROOT = Path(__file__).parents[2]
NUM_DOCUMENTS, DOCUMENT_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS = 12, 2048, 24, 8
NUM_REQUESTS, RATE = 144, 6.0
NUM_BLOCKS = 480  # of 32 tokens; a document has 64
ENGINES = {
    "vllm": (BalancedVllm, ("--max-model-len", "4096")),
    "sglang": (BalancedSglang, ("--context-length", "4096")),
}
WAYS = {"own": False, "kvplug": True}


def requests(seed):
    """(seconds after the one before, token ids) of each."""
    rng = random.Random(seed)
    ids = lambda count: [rng.randrange(10, 3900) for _ in range(count)]  # noqa: E731
    documents = [ids(DOCUMENT_TOKENS) for _ in range(NUM_DOCUMENTS)]
    order = [rng.choice(documents) for _ in range(NUM_REQUESTS)]
    return [(rng.expovariate(RATE), [*document, *ids(QUESTION_TOKENS)]) for document in order]


async def ask(session, prompt):
    """Seconds to the first token, and cached tokens."""
    body = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": ANSWER_TOKENS,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began_s, first_s, usage = time.perf_counter(), None, None
    async with session.post("/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            if first_s is None and chunk["choices"]:
                first_s = time.perf_counter() - began_s
            usage = chunk.get("usage") or usage
    details = usage.get("prompt_tokens_details") or {}
    return first_s, details.get("cached_tokens") or 0


async def load(server, seed):
    """One round: the cached share, and times to the first token."""
    # A connection for each request: several front ends share a port, and the kernel picks.
    connector = aiohttp.TCPConnector(force_close=True, limit=0)
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(
        server.endpoint.url, connector=connector, timeout=timeout
    ) as session:
        asked, prompts = [], []
        for pause_s, prompt in requests(seed):
            await asyncio.sleep(pause_s)
            prompts.append(prompt)
            asked.append(asyncio.create_task(ask(session, prompt)))
        answers = await asyncio.gather(*asked)
    times = sorted(1e3 * first_s for first_s, _ in answers)
    cached = sum(num for _, num in answers) / sum(map(len, prompts))
    return {
        "cached": cached,
        "ttft_p50_ms": median(times),
        "ttft_p99_ms": times[int(0.99 * (len(times) - 1))],
    }


def run_round(server, seed):
    """From an empty cache."""
    server.empty_cache()
    return asyncio.run(load(server, seed))


@contextmanager
def serving(servers):
    """All of them, ready."""
    try:
        for server in servers:
            server.start()
            server.wait_ready()
            signal_all(server, signal.SIGSTOP)
        yield
    finally:
        for server in servers:
            signal_all(server, signal.SIGCONT)
            server.stop()


def signal_all(server, signum):
    """To its processes, but for the one that sees to their end."""
    _lifeline, *others = sorted(server.process.members()) or [None]
    for process in others:
        with suppress(ProcessLookupError):
            os.kill(process, signum)


def run(engine, folder, rounds):
    """Rows of rounds by way."""
    kind, flags = ENGINES[engine]
    servers = {
        way: kind(folder / way, balances=balances, num_blocks=NUM_BLOCKS, flags=flags)
        for way, balances in WAYS.items()
    }
    rows = {way: [] for way in WAYS}
    with serving(servers.values()):
        for seed in range(rounds):
            for way in sorted(WAYS, reverse=bool(seed % 2)):
                signal_all(servers[way], signal.SIGCONT)
                rows[way].append(run_round(servers[way], seed))
                signal_all(servers[way], signal.SIGSTOP)
                say(engine, way, seed, rows[way][-1])
    return rows


def say(engine, way, seed, row):
    shown = "  ".join(f"{name} {value:8.3f}" for name, value in row.items())
    sys.stdout.write(f"{engine:7} {way:7} round {seed}:  {shown}\n")
    sys.stdout.flush()


def summary(engine, rows):
    """Metrics in the form of the other benchmarks."""
    metrics = {}
    for way, name in itertools.product(rows, rows["own"][0]):
        values = [row[name] for row in rows[way]]
        metrics[f"balancing_{engine}_{way}_{name}"] = {
            "value": round(median(values), 4),
            "min": round(min(values), 4),
            "max": round(max(values), 4),
        }
    return metrics


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="vllm,sglang")
    given = parser.parse_args()
    metrics = {}
    with tempfile.TemporaryDirectory(prefix="kvplug-") as folder:
        for engine in given.only.split(","):
            metrics |= summary(engine, run(engine, Path(folder) / engine, given.rounds))
    path = ROOT / "bench-results" / "balancing.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(metrics, indent=1) + "\n")
    sys.stdout.write(json.dumps(metrics) + "\n")


if __name__ == "__main__":
    main()
