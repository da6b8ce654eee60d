"""The plug-in on the stock wire (KVPLUG_WIRE=vllm), as others read it: vLLM's own types, Dynamo."""

import json
import random
import subprocess
from contextlib import contextmanager
from pathlib import Path

from examples.launch.engine_env import ensure_vllm
from kvplug import Router, RouterConfig
from tests.benchmarks.environments import dynamo_python
from tests.engines.engine_pool import Recipe, uses
from tests.engines.line_engine import Followed, line_engine
from tests.plugins.stock_client import StockClient, wait_until

HERE = Path(__file__).parent
BLOCK_SIZE = 32
ON_STOCK_WIRE = {"wire": "kvplug", "env": {"KVPLUG_WIRE": "vllm"}, "block_size": BLOCK_SIZE}


STOCK = line_engine("stock", block_size=BLOCK_SIZE)
PLUGGED = line_engine("plugged", **ON_STOCK_WIRE)
POOLING = Recipe("pooling", lambda folder: pooling(folder))


def pooling(folder):
    """Blocks of finished requests go into a pool of three."""
    connector = {
        "kv_connector": "CxlConnector",
        "kv_connector_module_path": "examples.cxl_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"folder": f"{folder}/pool", "pool_id": 3, "num_blocks": 3},
    }
    return line_engine("pooling", **ON_STOCK_WIRE, kv_transfer_config=connector).make(folder)


def tokens(seed, count):
    rnd = random.Random(seed)
    return [rnd.randrange(10, 4000) for _ in range(count)]


def workload(engine):
    """Shared prefixes, salts, decoded blocks, duplicates in one step, evictions, a reset."""
    rnd = random.Random(3)
    prefixes = [tokens(seed, 160) for seed in range(4)]
    for round_ in range(16):
        prompt = rnd.choice(prefixes) + tokens(100 + round_, rnd.randrange(1, 90))
        salt = rnd.choice([None, "tenant"])
        engine.ask(prompt, prompt, salt=salt, max_tokens=rnd.choice([1, 40]), reset=round_ == 10)


@contextmanager
def capturing(engine):
    """What a subscriber of the stock wire gets: all payloads so far, when it is called."""
    client, payloads = StockClient(), []
    client.subscribe(*engine.source)

    def everything():
        while len(payloads) <= engine.last:
            _, number, payload = client.receive()
            assert int.from_bytes(number, "big") == len(payloads)
            payloads.append(payload)
        return as_vllm_reads(payloads)

    try:
        yield everything
    finally:
        client.close()


def as_vllm_reads(payloads):
    """Batches as the types of vLLM have them."""
    lines = "".join(f"{payload.hex()}\n" for payload in payloads)
    command = [str(ensure_vllm()), str(HERE / "vllm_batches.py")]
    env = {"VLLM_LOGGING_LEVEL": "ERROR", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        command, input=lines, env=env, capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@uses(STOCK, PLUGGED)
def test_vllm_reads_of_the_plug_in_what_it_reads_of_its_own_publisher(engines):
    read = []
    for engine in engines:
        with capturing(engine) as everything:
            workload(engine)
            read.append(everything())
    stock, plugged = read
    kinds = [event["kind"] for batch in stock for event in batch["events"]]
    assert {kind: kinds.count(kind) > 1 for kind in ("BlockStored", "BlockRemoved")} == {
        "BlockStored": True,
        "BlockRemoved": True,
    }
    assert "AllBlocksCleared" in kinds
    assert as_vllm_publishes(plugged) == stock


def as_vllm_publishes(batches):
    """A clear is published at once, and by vLLM's own publisher with the next step."""
    joined = []
    for batch in batches:
        is_late = joined and [each["kind"] for each in joined[-1]["events"]] == ["AllBlocksCleared"]
        if is_late:
            joined[-1]["events"] += batch["events"]
        else:
            joined.append(batch)
    return joined


@uses(POOLING)
def test_vllm_reads_a_pool_as_a_medium(engine):
    prompt, other, short = tokens(1, 70), tokens(2, 70), tokens(3, 5)
    with capturing(engine) as everything:
        for each in (prompt, short, other, short):
            engine.ask(each)
        batches = everything()
    events = [event for batch in batches for event in batch["events"]]
    of = {
        (kind, medium): [
            name
            for event in events
            if (event["kind"], event.get("medium")) == (kind, medium)
            for name in event["block_hashes"]
        ]
        for kind in ("BlockStored", "BlockRemoved")
        for medium in ("GPU", "CXL")
    }
    assert len(of["BlockStored", "GPU"]) == 4
    assert of["BlockStored", "CXL"] == of["BlockStored", "GPU"]
    # What leaves the GPU is told with the next step; the end of a prompt leaves the pool first.
    assert sorted(of["BlockRemoved", "GPU"]) == sorted(of["BlockStored", "GPU"][:2])
    assert of["BlockRemoved", "CXL"] == of["BlockStored", "CXL"][1:2]


class Dynamo:
    """Its SelectionService, which follows an engine."""

    def __init__(self, engine):
        pipe = subprocess.PIPE
        command = [str(dynamo_python()), str(HERE / "dynamo_follows.py")]
        self._process = subprocess.Popen(
            [*command, str(engine.port), str(BLOCK_SIZE)], stdin=pipe, stdout=pipe, text=True
        )

    def __enter__(self):
        assert self._answer() == "follows"
        return self

    def __exit__(self, *_):
        self._process.stdin.close()
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()

    def num_blocks(self, prompt):
        self._process.stdin.write(json.dumps(prompt) + "\n")
        self._process.stdin.flush()
        return max(self._answer(), default=0)

    def _answer(self):
        line = self._process.stdout.readline()
        assert line, f"it ended with {self._process.wait()}"
        return json.loads(line)


@uses(PLUGGED)
def test_dynamo_follows_the_plug_in(engine, listener):
    router = Router(RouterConfig(block_size=BLOCK_SIZE, speculative_ttl_s=0.0))
    router.add_worker(engine.name)
    engine.ask(tokens(9, 5), reset=True)
    prompts = [tokens(seed, 200) for seed in range(20, 34)]
    with Dynamo(engine) as dynamo:
        wait_until(lambda: is_heard(engine, dynamo), "Dynamo hears the engine")
        engine.ask(tokens(9, 5), reset=True)
        followed = Followed(engine, router, listener)
        for prompt in prompts:  # more than the engine has room for
            engine.ask(prompt)
        followed.settle()
        expected = [followed.decide(each).overlap_blocks for each in prompts]
        assert 0 in expected
        assert max(expected) == 6
        wait_until(
            lambda: [dynamo.num_blocks(each) for each in prompts] == expected,
            "Dynamo knows what the router knows",
        )


def is_heard(engine, dynamo):
    """Store something until it is known: who subscribes gets what comes a moment later."""
    prompt = tokens(engine.last, 40)
    engine.ask(prompt)
    return dynamo.num_blocks(prompt) == 1


@uses(POOLING)
def test_dynamo_goes_on_where_blocks_go_into_a_pool(engine):
    with Dynamo(engine) as dynamo:
        wait_until(lambda: is_heard(engine, dynamo), "Dynamo hears the engine")
        prompt, short = tokens(50, 100), tokens(51, 5)
        engine.ask(prompt)
        wait_until(lambda: dynamo.num_blocks(prompt) == 3, "the prompt is stored")
        engine.ask(short)
        engine.ask(short)
        wait_until(lambda: dynamo.num_blocks(prompt) == 0, "it has left the device")
