"""The example programs, run as they are."""

import asyncio
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from examples import custom_constraint, in_process, minimize_ttft
from kvplug import AllBlocksCleared, BlockStored, EventBatch, codec
from kvplug.engines.publisher import Publisher
from kvplug.engines.settings import PublisherConfig
from kvplug.errors import NoWorkerError

ROOT = Path(__file__).parents[2]
PROMPT = list(range(1, 65))


def test_documents_stay_where_they_were_computed(capsys):
    in_process.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6
    for number in (0, 1):
        mine = [line for line in lines if line.startswith(f"document {number}")]
        assert mine[0].endswith(" 0 tokens cached")
        assert len({line.split(",")[0] for line in mine}) == 1
        assert all(line.endswith(" 992 tokens cached") for line in mine[1:])


def test_a_tenant_is_sent_elsewhere_at_its_limit(capsys):
    custom_constraint.main()
    lines = capsys.readouterr().out.splitlines()
    workers = [line.split()[2].rstrip(",") for line in lines]
    assert sorted(workers) == ["a", "a", "b", "b"]


def test_a_tenant_at_its_limit_everywhere_is_refused_until_a_request_ends():
    gateway = custom_constraint.Gateway()
    decisions = [gateway.route("acme", PROMPT) for _ in range(4)]
    with pytest.raises(NoWorkerError):
        gateway.route("acme", PROMPT)
    gateway.route("other", PROMPT)
    gateway.finish("acme", decisions[0])
    assert gateway.route("acme", PROMPT).rank == decisions[0].rank


def test_a_prompt_goes_where_the_least_is_to_prefill(capsys):
    asyncio.run(minimize_ttft.main())
    lines = capsys.readouterr().out.splitlines()
    assert [line.endswith(" 4 tokens") for line in lines] == [True] * 4
    first, *_, last = workers = [line.split()[2] for line in lines]
    assert (len(set(workers[:3])), last != first) == (1, True)
    assert lines[0].count(": 1001") == 2  # both would have to compute it all
    assert lines[1].count(": 9") == 1  # all but the blocks that are cached
    assert f"'{first}': 3009" in lines[3]


@pytest.fixture
def engines():
    """The event streams of two engines; the second has cached the prompt."""
    any_port = "tcp://127.0.0.1:0"
    config = PublisherConfig(endpoint=any_port, replay_endpoint=any_port)
    logger = logging.getLogger(__name__)
    a, b = [Publisher(config, 0, codec.encode, logger, must_bind=True) for _ in range(2)]
    a.publish(EventBatch(events=(AllBlocksCleared(),)))
    stored = BlockStored(block_hashes=(1, 2, 3, 4), token_ids=tuple(PROMPT), block_size=16)
    b.publish(EventBatch(events=(stored,)))
    yield {"a": a, "b": b}
    a.shutdown()
    b.shutdown()


@pytest.mark.slow
def test_a_gateway_follows_engines(engines):
    arguments = [f"{name},{e.endpoint},{e.replay_endpoint}" for name, e in engines.items()]
    command = [sys.executable, "-m", "examples.follow_engines", *arguments]
    prompt = " ".join(map(str, [*PROMPT, 99]))
    run = subprocess.run(
        command, input=f"{prompt}\n7 8 9\n", capture_output=True, text=True, cwd=ROOT, timeout=250
    )
    assert run.returncode == 0, run.stderr
    first, second = run.stdout.splitlines()
    assert first == "b 64"
    assert second.endswith(" 0")
