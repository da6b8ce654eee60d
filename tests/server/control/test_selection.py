"""/select and /reservations, as a gateway that forwards itself uses them."""

import json

import pytest

from examples.launch.engine_env import ensure_tiny_tokenizer
from kvplug import BlockStored, EventBatch, Rank
from kvplug.hashing import BlockHasher, as_tokens
from kvplug.server.config import TokenizerFolder
from tests.server.engine import Engine
from tests.server.test_service import error_of, routing

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9]


async def select(client, **asked):
    async with client.post("/select", json=asked) as response:
        assert response.status == 200, await response.text()
        return await response.json()


def store(service, url, tokens):
    blocks = [tokens[at : at + 4] for at in range(0, len(tokens) // 4 * 4, 4)]
    event = BlockStored(
        block_hashes=tuple(range(1, len(blocks) + 1)),
        token_ids=tuple(token for block in blocks for token in block),
        block_size=4,
    )
    service.router.apply(Rank(url), EventBatch(ts=0.0, events=(event,)))
    service.router.set_confidence(Rank(url), 1.0)


async def test_the_worker_with_the_prefix_is_selected_and_nothing_is_booked():
    async with routing(Engine(), Engine()) as (service, client):
        first, second = service.fleet.workers
        store(service, second, PROMPT)
        found = await select(client, model="m", token_ids=PROMPT, explain=True)
        assert (found["worker"], found["url"], found["dp_rank"]) == (second, second, 0)
        assert (found["overlap_blocks"], found["cached_tokens"]) == (2, 8)
        assert (found["prompt_tokens"], found["prompt_blocks"], found["block_size"]) == (9, 2, 4)
        assert (found["request_id"], found["expires_s"], found["headers"]) == ("", None, {})
        assert [each["worker"] for each in found["ranked"]] == [second, first]
        assert found["ranked"][0]["cost"] <= found["ranked"][1]["cost"]
        assert (found["cost_unit"], found["reason"]) == ("ms", "prefix")
        views = {view["worker"]: view for view in found["ranks"]}
        assert (views[first]["overlap_blocks"], views[second]["overlap_blocks"]) == (0, 2)
        assert views[first]["potential_prefill_tokens"] == 9
        assert len(service.router.load) == 0


async def test_hashes_select_as_tokens_do():
    async with routing(Engine(), Engine()) as (service, client):
        _, second = service.fleet.workers
        store(service, second, PROMPT)
        hashes = BlockHasher(4).sequence_hashes(as_tokens(PROMPT)).tolist()
        found = await select(client, sequence_hashes=hashes, num_tokens=9)
        assert (found["worker"], found["overlap_blocks"], found["prompt_tokens"]) == (second, 2, 9)
        found = await select(client, sequence_hashes=hashes, num_tokens=9, reserve=True)
        assert found["request_id"]
        assert found["is_prefix_known"]


@pytest.mark.parametrize(
    "asked",
    [
        {"text": "once upon a time"},
        {"body": {"prompt": "once upon a time"}, "path": "/v1/completions"},
    ],
)
async def test_text_is_tokenized_as_a_clients(asked):
    folder = TokenizerFolder(ensure_tiny_tokenizer())
    async with routing(Engine(), tokenizers=(folder,)) as (_, client):
        found = await select(client, **asked)
        assert found["is_prefix_known"]
        assert found["prompt_tokens"] > 2


async def test_without_a_tokenizer_load_alone_decides_and_the_answer_says_so():
    async with routing(Engine()) as (_, client):
        found = await select(client, messages=[{"role": "user", "content": "hi"}], explain=True)
        assert (found["is_prefix_known"], found["ranks"]) == (False, None)


CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("asked", "settings", "reason"),
    [
        ({"token_ids": PROMPT}, {}, "prefix"),
        ({"token_ids": PROMPT, "overlap_score_weight": 0}, {}, "load"),
        ({"token_ids": [7, 7, 7, 7, 7]}, {}, "load"),
        ({"text": "a"}, {}, "no_tokenizer"),
        ({"body": {"messages": [], "prompt_embeds": "x"}, "path": CHAT}, {}, "prompt_embeds"),
        (
            {"body": {"input": "a", "previous_response_id": "r"}, "path": "/v1/responses"},
            {},
            "previous_response",
        ),
        ({"token_ids": [7, 7, 7, 7, 7], "extra_key": "k"}, {}, "extra_key"),
        ({"token_ids": [1]}, {"mode": "rendezvous_hash"}, "least_loaded"),
        ({"token_ids": [1], "session": "s"}, {"mode": "rendezvous_hash"}, "session"),
        ({"token_ids": [1]}, {"mode": "round_robin"}, "round_robin"),
        ({"token_ids": [1]}, {"mode": "random"}, "random"),
        ({"text": "a"}, {"mode": "power_of_two"}, "power_of_two"),
        ({"token_ids": [1]}, {"mode": "least_loaded"}, "least_loaded"),
    ],
)
async def test_the_answer_says_what_decided(asked, settings, reason):
    async with routing(Engine(), Engine(), **settings) as (service, client):
        _, second = service.fleet.workers
        store(service, second, PROMPT)
        assert (await select(client, **asked))["reason"] == reason
        assert (await select(client, worker=second, **asked))["reason"] == "pinned"


PICTURE = {"type": "image_url", "image_url": {"url": "http://x/y.png"}}


async def test_a_picture_at_the_beginning_leaves_nothing_to_decide_by():
    folder = TokenizerFolder(ensure_tiny_tokenizer())
    async with routing(Engine(), tokenizers=(folder,)) as (_, client):
        chat = [{"role": "user", "content": [PICTURE]}]
        assert (await select(client, messages=chat))["reason"] == "multimodal"


async def test_a_reservation_is_load_until_it_is_finished():
    async with routing(Engine(), Engine()) as (service, client):
        first, second = service.fleet.workers
        found = await select(client, token_ids=PROMPT, reserve=True, request_id="r/1")
        assert (found["request_id"], found["expires_s"]) == ("r/1", 600.0)
        path = "/reservations/r%2F1"
        async with client.get(path) as response:
            state = await response.json()
        assert (state["worker"], state["has_first_token"]) == (found["worker"], False)
        assert 0 < state["expires_s"] <= 600
        for _ in range(2):  # what is said twice is no error
            async with client.post(f"{path}/first_token") as response:
                assert (response.status, await response.read()) == (204, b"")
        async with client.post(f"{path}/renew") as response:
            assert response.status == 204
        other = second if found["worker"] == first else first
        async with client.post(f"{path}/moved", json={"worker": other}) as response:
            assert response.status == 204
        async with client.get(path) as response:
            assert (await response.json())["worker"] == other
        assert len(service.router.load) == 1
        counts = service.proxy.counts[found["worker"]]
        assert (counts.num_requests, counts.num_prompt_tokens) == (1, 9)
        usage = {"completion_tokens": 5, "prompt_tokens": 9, "cached_tokens": 0}
        async with client.post(f"{path}/finish", json=usage) as response:
            assert response.status == 204
        assert len(service.router.load) == 0
        async with client.post(f"{path}/finish", json=usage) as response:
            assert (await error_of(response))[:2] == (404, "request_not_found")


async def test_a_reservation_can_be_deleted():
    async with routing(Engine()) as (service, client):
        found = await select(client, token_ids=PROMPT, reserve=True)
        async with client.delete(f"/reservations/{found['request_id']}") as response:
            assert response.status == 204
        assert len(service.router.load) == 0


async def reserved(client, worker, verb, **said):
    """A reservation on the worker that ends as is said."""
    found = await select(client, token_ids=PROMPT, reserve=True, workers=[worker])
    async with client.post(f"/reservations/{found['request_id']}/{verb}", json=said) as response:
        assert response.status == 204, await response.text()


@pytest.mark.parametrize("said", [{}, {"status": 503}])
async def test_a_worker_that_gateways_report_again_and_again_is_left_out(said):
    async with routing(Engine(), Engine(), eject_after=2, ejection_s=60.0) as (service, client):
        first, second = service.fleet.workers
        left_s, counts = service.fleet.ejections.left_s, service.proxy.counts
        for answered in ({"completion_tokens": 1}, {"prompt_tokens": 9}):
            await reserved(client, first, "failed", **said)
            await reserved(client, first, "finish", **answered)  # so it was not in a row
        assert left_s(first) is None
        await reserved(client, first, "failed", **said)
        await reserved(client, first, "finish")  # which says nothing of the worker
        await reserved(client, first, "failed", **said)
        assert len(service.router.load) == 0
        assert 0 < left_s(first) <= 60
        assert counts[first].num_ejections == 1
        assert counts[first].num_lost == (0 if said else 4)
        for _ in range(4):
            assert (await select(client, token_ids=PROMPT))["worker"] == second


async def test_the_failure_of_a_request_that_moved_is_of_where_it_moved_to():
    async with routing(Engine(), Engine(), eject_after=1) as (service, client):
        first, second = service.fleet.workers
        found = await select(client, token_ids=PROMPT, reserve=True, workers=[first])
        path = f"/reservations/{found['request_id']}"
        for verb, said in (("moved", {"worker": second}), ("failed", {})):
            async with client.post(f"{path}/{verb}", json=said) as response:
                assert response.status == 204
        left_s = service.fleet.ejections.left_s
        assert (left_s(first), left_s(second) is None) == (None, False)


async def test_what_a_request_is_to_blame_for_is_no_failure_of_its_worker():
    async with routing(Engine(), eject_after=1) as (service, client):
        [url] = service.fleet.workers
        await reserved(client, url, "failed", status=400)
        assert service.fleet.ejections.left_s(url) is None
        found = await select(client, token_ids=PROMPT, reserve=True)
        path = f"/reservations/{found['request_id']}/failed"
        async with client.post(path, json={"status": 200}) as response:
            assert (await error_of(response))[:2] == (400, "invalid_field")
        assert len(service.router.load) == 1


async def test_an_id_that_is_in_flight_is_a_conflict():
    async with routing(Engine()) as (_, client):
        asked = {"token_ids": PROMPT, "reserve": True, "request_id": "a"}
        await select(client, **asked)
        async with client.post("/select", json=asked) as response:
            assert (await error_of(response))[:2] == (409, "request_id_in_flight")


@pytest.mark.parametrize("verb", ["first_token", "renew", "moved", "finish", "failed", None])
async def test_of_a_request_that_is_not_in_flight_nothing_can_be_said(verb):
    async with routing(Engine()) as (service, client):
        url = next(iter(service.fleet.workers))
        body = {"worker": url} if verb == "moved" else {}
        path = "/reservations/nobody" + (f"/{verb}" if verb else "")
        async with client.request("POST" if verb else "DELETE", path, json=body) as response:
            assert (await error_of(response))[:2] == (404, "request_not_found")


async def test_a_request_cannot_move_to_a_worker_that_is_none():
    async with routing(Engine()) as (_, client):
        found = await select(client, token_ids=PROMPT, reserve=True)
        path = f"/reservations/{found['request_id']}/moved"
        async with client.post(path, json={"worker": "http://nowhere"}) as response:
            assert (await error_of(response))[:2] == (404, "worker_not_found")


async def test_only_some_workers_may_be_candidates():
    async with routing(Engine(), Engine()) as (service, client):
        first, second = service.fleet.workers
        for url in (first, second):
            assert (await select(client, token_ids=[1], workers=[url]))["worker"] == url
        async with client.post("/select", json={"token_ids": [1], "workers": []}) as response:
            assert (await error_of(response))[:2] == (503, "no_worker")
        asked = {"token_ids": [1], "required_taints": ["gpu"]}
        async with client.post("/select", json=asked) as response:
            body = await response.json()
            assert (response.status, body["error"]["param"]) == (503, "required_taints")


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        ({}, "invalid_field"),
        ({"token_ids": [1], "text": "a"}, "invalid_field"),
        ({"tokens": [1]}, "invalid_field"),
        ({"token_ids": "abc"}, "invalid_field"),
        ({"token_ids": [-1]}, "invalid_field"),
        ({"token_ids": [2**32]}, "invalid_field"),
        ({"token_ids": [10**400]}, "invalid_field"),
        ({"token_ids": [1.5]}, "invalid_field"),
        ({"token_ids": {}}, "invalid_field"),
        ({"sequence_hashes": [1]}, "invalid_field"),
        ({"sequence_hashes": [-1], "num_tokens": 4}, "invalid_field"),
        ({"sequence_hashes": [2**64], "num_tokens": 4}, "invalid_field"),
        ({"sequence_hashes": [1, 2, 3], "num_tokens": 2}, "invalid_field"),
        ({"sequence_hashes": [1], "num_tokens": -1}, "invalid_field"),
        ({"text": 5}, "invalid_field"),
        ({"text": "a", "path": "/v1/nope", "body": None}, "invalid_field"),
        ({"body": [], "path": "/v1/completions"}, "invalid_json"),
        ({"body": {"model": 5}}, "model_required"),
        ({"body": {}, "path": "/select"}, "invalid_field"),
        ({"token_ids": [1], "dp_rank": -1}, "invalid_field"),
        ({"token_ids": [1], "dp_rank": 10**30}, "invalid_field"),
        ({"token_ids": [1], "num_ranked": 5000}, "invalid_field"),
        ({"token_ids": [1], "reserve": 1}, "invalid_field"),
        ({"token_ids": [1], "reserve": True, "request_id": ""}, "invalid_field"),
        ({"token_ids": [1], "workers": "all"}, "invalid_field"),
        ({"token_ids": [1], "preferred_taints": {"a": "b"}}, "invalid_field"),
        ({"token_ids": [1], "router_temperature": -1}, "invalid_field"),
        ({"token_ids": [1], "max_tokens": -1}, "invalid_field"),
    ],
)
async def test_what_cannot_be_meant_is_refused_by_name(asked, code):
    async with routing(Engine(models=["m", "n"])) as (service, client):
        asked = asked if "body" in asked else {"model": "m", **asked}
        async with client.post("/select", json=asked) as response:
            status, seen, message = await error_of(response)
        assert (status, seen) == (400, code), message
        assert len(service.router.load) == 0


@pytest.mark.parametrize(
    "raw",
    [b"", b"[]", b"{", b"\xff", b'{"token_ids":' * 9, b"[" * 10**5, b'{"body":' + b"[" * 10**6],
)
async def test_what_is_no_json_object_is_refused(raw):
    async with routing(Engine()) as (_, client):
        headers = {"Content-Type": "application/json"}
        async with client.post("/select", data=raw, headers=headers) as response:
            assert response.status == 400, await response.text()


async def test_a_model_that_nobody_serves_is_404():
    async with (
        routing(Engine()) as (_, client),
        client.post("/select", json={"model": "x", "token_ids": [1]}) as response,
    ):
        assert (await error_of(response))[:2] == (404, "model_not_found")


async def test_web_pages_and_other_hosts_may_not_ask():
    async with routing(Engine()) as (service, client):
        body = json.dumps({"token_ids": [1]})
        async with client.post("/select", data=body) as response:
            assert (await error_of(response))[:2] == (415, "invalid_content_type")
        for headers in ({"Origin": "http://evil"}, {"Host": "evil.example"}, {"Host": "["}):
            for method, path in (
                ("POST", "/select"),
                ("GET", "/workers"),
                ("DELETE", "/workers/x"),
            ):
                headers |= {"Content-Type": "application/json"}
                async with client.request(method, path, data=body, headers=headers) as response:
                    assert response.status in (400, 403), headers
        assert len(service.fleet.workers) == 1


async def test_with_a_key_only_who_has_it_may_ask(tmp_path):
    file = tmp_path / "key"
    file.write_text("secret\n")
    async with routing(Engine(), admin_api_key_file=file) as (_, client):
        for given in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer \xe9"}):
            async with client.post("/select", json={"token_ids": [1]}, headers=given) as response:
                assert (await error_of(response))[:2] == (401, "admin_key_required")
        given = {"Authorization": "bearer secret", "Host": "router.example"}
        async with client.post("/select", json={"token_ids": [1]}, headers=given) as response:
            assert response.status == 200
        async with client.post("/v1/completions", json={"prompt": [1]}) as response:
            assert response.status == 200


async def test_on_a_network_nobody_may_ask_without_a_key():
    async with (
        routing(Engine(), host="0.0.0.0") as (_, client),
        client.get(f"http://127.0.0.1:{client._base_url.port}/workers") as response,
    ):
        status, code, message = await error_of(response)
        assert (status, code) == (403, "admin_key_required")
        assert "--admin-api-key-file" in message
