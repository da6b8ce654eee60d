"""Real vLLM started with the wrong settings: each one is named, with its fix.

vLLM 0.32.0 says what it does in GET /version, /kv_event_sources and /metrics.
"""

import json
from contextlib import asynccontextmanager

import aiohttp

from examples.launch.vllm_server import VllmServer
from kvplug.router.config import RouterConfig
from kvplug.server.config import ServerConfig, TokenizerFolder, WorkerSpec
from kvplug.server.diagnosis.finding import Code
from kvplug.server.service import RouterService
from tests.engines.engine_pool import uses
from tests.engines.engine_start import vllm_server
from tests.engines.test_vllm_served import complete, ids
from tests.server.diagnosis.conftest import save_word_tokenizer
from tests.server.diagnosis.test_doctor import doctor_process
from tests.waiting import until


class Silent(VllmServer):
    """Publishes no events, and reports no cached tokens."""

    def _command(self):
        command = super()._command()
        at = command.index("--kv-events-config")
        return [
            part
            for place, part in enumerate(command)
            if place not in (at, at + 1) and part != "--enable-prompt-tokens-details"
        ]


class WithoutReplay(VllmServer):
    """Publishes events, and keeps none."""

    def _events_config(self):
        return json.dumps(json.loads(super()._events_config()) | {"replay_endpoint": None})


pytestmark = uses(vllm_server("silent", Silent), vllm_server("no-replay", WithoutReplay))


@asynccontextmanager
async def routing(*specs, block_size=32, **more):
    config = ServerConfig(
        workers=specs,
        port=0,
        router=RouterConfig(block_size=block_size, mode="round_robin"),
        health_interval_s=0.2,
        **more,
    )
    async with RouterService(config) as service, aiohttp.ClientSession(service.url) as client:
        await service.diagnosis.ask()
        yield service, client


def spec_of(engine, **more):
    return WorkerSpec(url=engine.url, events=engine.events_endpoint, **more)


def found(service, engine):
    return {f.code: f for f in service.diagnosis.look() if f.worker == engine.url}


async def test_wrong_settings_are_named_and_their_fixes_are_the_engines_flags(engines):
    silent, other = engines
    specs = (spec_of(silent), spec_of(other, topic="kv@elsewhere"))
    async with routing(*specs, block_size=16) as (service, client):
        assert found(service, silent).keys() == {Code.BLOCK_SIZE, Code.EVENTS_OFF}
        assert found(service, other).keys() == {Code.BLOCK_SIZE, Code.TOPIC, Code.REPLAY_OFF}
        for _ in range(16):  # by turns
            await complete(client, ids(80, 100), max_tokens=1)
        await until(lambda: Code.NO_EVENTS in found(service, other), "the silence is found")
        findings = found(service, silent)
        assert Code.NO_CACHED_TOKENS in findings
        assert "--enable-prompt-tokens-details" in findings[Code.NO_CACHED_TOKENS].fix
        assert "--kv-events-config '{" in findings[Code.EVENTS_OFF].fix
        assert "--block-size 32" in findings[Code.BLOCK_SIZE].fix
        code, out, _ = await doctor_process("--url", service.url)
        assert code == 1
        assert all(each in out for each in (silent.url, other.url, "no_cached_tokens", "topic"))


async def test_with_the_right_settings_only_what_the_engine_lacks_is_left(engines):
    _, other = engines
    async with routing(spec_of(other)) as (service, client):
        follower = service.fleet.workers[other.url].followers[0]
        num_before = 0
        while not follower.num_messages:  # until the subscription has arrived
            assert num_before < 50
            await complete(client, ids(200 + num_before, 100), max_tokens=1)
            num_before += 1
        for number in range(10):
            await complete(client, ids(90 + number, 100), max_tokens=1)
        [ledger] = service.audit.ledgers().values()
        await until(lambda: len(ledger.was_stored) == num_before + 10, "all settle")
        # The tokenizer was compared with the engine's /tokenize, too, and the topic was right.
        codes = found(service, other).keys() - {Code.EVENTS_INCOMPLETE}
        assert codes == {Code.REPLAY_OFF}
        assert all(list(ledger.was_stored)[num_before:])
        assert ledger.num_audited == num_before + 10
    worker = f"{other.url},events={other.events_endpoint}"
    code, out, _ = await doctor_process("--worker", worker, "--block-size", "32")
    assert (code, out.split()[:2]) == (1, [other.url, "replay_off"])


async def test_blocks_of_another_size_are_rejected_and_counted(engines):
    _, other = engines
    async with routing(spec_of(other), block_size=64) as (service, client):
        follower = service.fleet.workers[other.url].followers[0]
        await until(lambda: follower.connected, "its events are followed")
        await complete(client, ids(110, 100), max_tokens=1)
        await until(lambda: follower.skipped["block_size"] == 3, "its blocks are refused")
        assert found(service, other)[Code.BLOCK_SIZE].seen == "32, 3 blocks refused"


async def test_a_tokenizer_that_is_not_the_engines_is_named(engines, tmp_path):
    _, other = engines
    async with routing(
        spec_of(other), tokenizers=(TokenizerFolder(save_word_tokenizer(tmp_path)),)
    ) as (service, _):
        finding = found(service, other)[Code.TOKENIZER]
        assert finding.expected.startswith("a probe text in ")
        assert finding.seen != finding.expected
