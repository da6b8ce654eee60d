"""Streams that break off and go on elsewhere: the client sees one answer, token by token."""

import json
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from tests.server.proxy.counting_engine import CHAT_PROMPT, CountingEngine, counting
from tests.server.test_service import serving

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"prompt": [1, 2, 3]}
PATHS = {"completions": COMPLETION, "chat/completions": CHAT}


@asynccontextmanager
async def before(*engines, migrate_streams=True, **settings):
    """(service, client): a router that asks the engines in turn, the first one first."""
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(counting(engine)) for engine in engines]
        how = {"mode": "round_robin", "migrate_streams": migrate_streams, **settings}
        yield await stack.enter_async_context(serving(urls, **how))


async def events_of(client, kind, **more):
    """What the client gets: chunks as dicts, then "[DONE]"."""
    body = {"model": "m", "stream": True, "max_tokens": 5, **PATHS[kind], **more}
    async with client.post(f"/v1/{kind}", json=body) as response:
        assert response.status == 200
        events = (await response.read()).decode().strip().split("\n\n")
    data = [event.removeprefix("data: ") for event in events]
    return [json.loads(each) if each.startswith("{") else each for each in data]


async def unbroken(kind, **more):
    async with before(CountingEngine("a"), migrate_streams=False) as (_, client):
        return await events_of(client, kind, **more)


@pytest.mark.parametrize("kind", PATHS)
@pytest.mark.parametrize("dies_after", [1, 2, 4])
@pytest.mark.parametrize("more", [{}, {"stream_options": {"include_usage": True}}])
async def test_the_client_sees_one_answer(kind, dies_after, more):
    first, second = CountingEngine("a", dies_after=dies_after), CountingEngine("b")
    async with before(first, second) as (service, client):
        assert await events_of(client, kind, **more) == await unbroken(kind, **more)
        assert len(service.router.load) == 0
        counts = service.proxy.counts.values()
        assert [(each.num_broken, each.num_migrated) for each in counts] == [(1, 0), (0, 1)]
    path, body = second.bodies[-1]
    prompt = CHAT_PROMPT if "messages" in PATHS[kind] else [1, 2, 3]
    made = [prompt[-1] + number for number in range(1, dies_after + 1)]
    assert (path, body["prompt"]) == ("/v1/completions", prompt + made)
    assert body["max_tokens"] == 5 - dies_after
    assert body.get("stream_options") == more.get("stream_options")


@pytest.mark.parametrize("kind", PATHS)
async def test_it_goes_on_more_than_once(kind):
    engines = [CountingEngine(name, dies_after=1) for name in "abc"]
    async with before(*engines, CountingEngine("d")) as (_, client):
        assert await events_of(client, kind) == await unbroken(kind)


async def test_tokens_whose_text_had_not_come_are_generated_again():
    engines = CountingEngine("a", dies_after=2, silent=[5]), CountingEngine("b", silent=[5])
    async with before(*engines) as (_, client):
        *chunks, done = await events_of(client, "completions")
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == " 4 5 6 7 8"
    assert (engines[1].bodies[-1][1]["prompt"], done) == ([1, 2, 3, 4], "[DONE]")


@pytest.mark.parametrize("kind", PATHS)
@pytest.mark.parametrize("dies_after", ["end", "usage"])
@pytest.mark.parametrize("more", [{}, {"stream_options": {"include_usage": True}}])
async def test_where_only_the_end_is_missing_nobody_is_asked(kind, dies_after, more):
    first, second = CountingEngine("a", dies_after=dies_after), CountingEngine("b")
    async with before(first, second) as (_, client):
        assert await events_of(client, kind, **more) == await unbroken(kind, **more)
    assert second.bodies == []


@pytest.mark.parametrize("kind", PATHS)
async def test_a_second_worker_that_breaks_behind_the_usage_does_not_repeat_it(kind):
    engines = CountingEngine("a", dies_after=2), CountingEngine("b", dies_after="usage")
    more = {"stream_options": {"include_usage": True}}
    async with before(*engines) as (_, client):
        assert await events_of(client, kind, **more) == await unbroken(kind, **more)


@pytest.mark.parametrize(
    "more",
    [
        {"n": 2},
        {"logprobs": 0},
        {"stop": ["x"]},
        {"presence_penalty": 0.5},
        {"structured_outputs": {"regex": "x"}},
        {"return_token_ids": False},
        {"some_field": 1},
    ],
)
async def test_what_cannot_be_continued_exactly_ends_with_an_error(more):
    first, second = CountingEngine("a", dies_after=2), CountingEngine("b")
    async with before(first, second) as (service, client):
        *_, last = await events_of(client, "completions", **more)
        assert last["error"]["code"] == "worker_lost"
        assert len(service.router.load) == 0
    assert second.bodies == []
    assert (
        first.bodies[0][1] == {"model": "m", "stream": True, "max_tokens": 5, **COMPLETION} | more
    )


async def test_images_and_tools_are_not_continued():
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    tools = [{"type": "function", "function": {"name": "f"}}]
    for more in ({"messages": [image]}, {"tools": tools}):
        async with before(CountingEngine("a", dies_after=2), CountingEngine("b")) as (_, client):
            *_, last = await events_of(client, "chat/completions", **more)
            assert last["error"]["code"] == "worker_lost"


@pytest.mark.parametrize("settings", [{}, {"dies_after": 0}])
async def test_with_nowhere_to_go_it_ends_with_an_error(settings):
    engines = [CountingEngine("a", dies_after=2)]
    engines += [CountingEngine("b", dies_after=0)] if settings else []
    async with before(*engines) as (service, client):
        *chunks, last = await events_of(client, "completions")
        assert [chunk["choices"][0]["text"] for chunk in chunks] == [" 4", " 5"]
        assert last["error"]["code"] == "worker_lost"
        assert len(service.router.load) == 0


async def test_by_default_bodies_go_as_they_came_and_streams_end():
    first, second = CountingEngine("a", dies_after=2), CountingEngine("b")
    async with before(first, second, migrate_streams=False) as (_, client):
        *_, last = await events_of(client, "completions")
    assert last["error"]["code"] == "worker_lost"
    assert "return_token_ids" not in first.bodies[0][1]


@pytest.mark.parametrize("kind", PATHS)
async def test_usage_is_asked_for_and_taken_out(kind):
    engine = CountingEngine("a")
    async with before(engine, migrate_streams=False, ask_usage=True) as (service, client):
        assert await events_of(client, kind) == await unbroken(kind)
        assert engine.bodies[-1][1]["stream_options"] == {"include_usage": True}
        options = {"stream_options": {"include_usage": True}}
        assert await events_of(client, kind, **options) == await unbroken(kind, **options)
        options = {"stream_options": {"include_usage": False}}
        assert await events_of(client, kind, **options) == await unbroken(kind)
        assert len(service.router.load) == 0
