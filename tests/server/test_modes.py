"""The router modes that need something of the request, over HTTP."""

from tests.server.engine import Engine
from tests.server.test_service import COMPLETION, post_error, routing


async def served_by(client, service, **request):
    """The URL of the worker that a completion went to."""
    before = {url: counts.num_requests for url, counts in service.proxy.counts.items()}
    async with client.post("/v1/completions", json=COMPLETION, **request) as response:
        assert response.status == 200
    [url] = [u for u, c in service.proxy.counts.items() if c.num_requests > before[u]]
    return url


async def test_a_session_stays_on_its_worker_and_sessions_are_spread():
    async with routing(Engine(), Engine(), mode="rendezvous_hash") as (service, client):
        of_session = {}
        for number in range(16):
            headers = {"x-session-id": f"s{number}"}
            first = await served_by(client, service, headers=headers)
            assert await served_by(client, service, headers=headers) == first
            of_session[number] = first
        assert len(set(of_session.values())) == 2


async def test_direct_goes_where_the_header_says():
    async with routing(Engine(), Engine(), mode="direct") as (service, client):
        for url in [*service.proxy.counts] * 2:
            assert await served_by(client, service, headers={"x-kvplug-worker": url}) == url


async def test_direct_to_nobody_is_503_and_names_whom():
    async with routing(Engine(), mode="direct") as (_, client):
        client.headers["x-kvplug-worker"] = "http://nobody"
        status, code, message = await post_error(client, COMPLETION)
    assert (status, code) == (503, "no_worker")
    assert message.startswith("worker 'http://nobody' is none that serves")
