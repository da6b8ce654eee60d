"""Workers behind Unix sockets."""

import json

from tests.server.engine import Engine, served
from tests.server.test_service import COMPLETION, post_error, serving
from tests.waiting import until


async def test_a_worker_behind_a_unix_socket_is_one_like_others(tmp_path):
    engine, other = Engine(), Engine(models=["n"])
    engine.says["/kv_event_sources"] = {}
    async with (
        served(engine, socket=tmp_path / "engine.sock") as url,
        served(other) as other_url,
        serving([url, other_url]) as (service, client),
    ):
        assert service.fleet.workers[url].is_up
        assert set(service.fleet.models) == {"m", "n"}
        for stream in (False, True):
            body = {**COMPLETION, "stream": stream}
            async with client.post("/v1/completions", json=body) as response:
                assert response.status == 200
                assert b"choices" in await response.read()
        assert json.loads(engine.last_body)["stream"]
        assert engine.last_headers["Host"] == "localhost"
        assert service.proxy.counts[url].num_requests == 2


async def test_a_unix_socket_that_is_gone_is_a_worker_that_is_down(tmp_path):
    engine, path = Engine(), tmp_path / "engine.sock"
    async with served(engine, socket=path) as url, serving([url]) as (service, client):
        assert service.fleet.workers[url].is_up
        path.unlink()
        assert (await post_error(client, COMPLETION))[:2] == (503, "no_worker")
        await until(lambda: not service.fleet.workers[url].is_up, "it is down")
