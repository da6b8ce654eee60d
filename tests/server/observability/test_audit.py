"""The audit in the standalone router, from answers on real sockets."""

import pytest

from kvplug.audit.expectation import Verdict
from tests.server.engine import Engine
from tests.server.test_service import COMPLETION, routing
from tests.waiting import until

NUM_TOKENS = len(COMPLETION["prompt"])


def usage(cached_tokens):
    return {
        "prompt_tokens": NUM_TOKENS,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


async def ledger_of(service):
    """The only ledger, as soon as something is in it."""

    def entered():
        for ledger in service.audit.ledgers().values():
            if ledger.num_audited or ledger.num_skipped:
                return ledger
        return None

    return await until(entered, "a request is audited or skipped")


async def ask(client, **more):
    async with client.post("/v1/completions", json={**COMPLETION, **more}) as response:
        return response.status, await response.read()


@pytest.mark.parametrize("stream", [False, True])
async def test_answers_are_audited_streamed_or_not(stream):
    engine = Engine()
    engine.usage = usage(0)
    async with routing(engine) as (service, client):
        assert (await ask(client, stream=stream))[0] == 200
        ledger = await ledger_of(service)
        assert dict(ledger.num_by_verdict) == {Verdict.AS_PREDICTED: 1}
        async with client.get("/metrics") as response:
            text = await response.text()
    worker = f'worker="{engine_url(service)}"'
    assert f'kvplug_audited_total{{verdict="as_predicted",{worker}}} 1.0' in text
    assert f'kvplug_prediction_error_blocks_bucket{{le="0",{worker}}} 1.0' in text
    assert f"kvplug_incorrect_routing_rate{{{worker}}} 0.0" in text


def engine_url(service):
    [url] = service.fleet.workers
    return url


async def test_a_speculative_block_that_was_not_there_is_wrong(monkeypatch):
    monkeypatch.setattr("kvplug.audit.audit._MAX_WAIT_S", 1.5)  # for events that never come
    engine = Engine()
    engine.usage = usage(0)
    async with routing(engine) as (service, client):
        await ask(client)
        await ask(client)  # counts on the block of the first
        ledger = await ledger_of(service)
        await until(lambda: service.audit.ledgers() and ledger.num_audited == 2, "both are audited")
        assert ledger.num_by_verdict[Verdict.WRONG_SPECULATIVE] == 1
        assert ledger.incorrect_rate == 0.5


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_without_usage_is_passed_on_and_counted(stream):
    engine = Engine()
    async with routing(engine) as (service, client):
        await ask(client, stream=stream)
        assert dict((await ledger_of(service)).num_skipped) == {"no_usage": 1}
    assert b"include_usage" not in engine.last_body


@pytest.mark.parametrize(
    ("behaviour", "stream"), [("refuse", False), ("half", True), ("silent", False)]
)
async def test_what_ends_early_or_fails_is_not_audited(behaviour, stream):
    engine = Engine()
    engine.behaviour, engine.usage = behaviour, usage(0)
    async with routing(engine, request_timeout_s=0.2) as (service, client):
        await ask(client, stream=stream)
        assert dict((await ledger_of(service)).num_skipped) == {"no_whole_answer": 1}


async def test_a_client_that_leaves_is_not_audited():
    engine = Engine()
    engine.behaviour, engine.usage = "slow", usage(0)
    async with routing(engine) as (service, client):
        body = {**COMPLETION, "stream": True}
        async with client.post("/v1/completions", json=body) as response:
            await response.content.readline()
            response.close()
        assert dict((await ledger_of(service)).num_skipped) == {"no_whole_answer": 1}


@pytest.mark.parametrize(
    ("more", "reason"),
    [({"prompt": "text"}, "no_token_ids"), ({"n": 3}, "several_answers")],
)
async def test_what_cannot_be_compared_is_counted_by_reason(more, reason):
    async with routing(Engine()) as (service, client):
        await ask(client, **more)
        assert dict((await ledger_of(service)).num_skipped) == {reason: 1}


async def test_a_sample_of_nothing_is_no_audit():
    engine = Engine()
    engine.usage = usage(0)
    async with routing(engine, audit_sample=0.0) as (service, client):
        await ask(client)
        assert service.audit.ledgers() == {}
