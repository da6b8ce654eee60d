"""Given one address of SGLang with two data-parallel ranks, the router finds the rest."""

import pytest

from tests.engines.engine_pool import uses
from tests.engines.one_address import TEXT, known, routes_by_prefix, told_only
from tests.engines.plugged_sglang import plugged_sglang

ENGINE = plugged_sglang("sglang-ranks", dp_size=2)
pytestmark = uses(ENGINE)


@pytest.mark.parametrize("named_by", ["url", "events"])
async def test_one_address_is_enough_to_route_text_by_its_prefix(named_by, engine):
    server = engine.server
    name = server.url if named_by == "url" else server.events_endpoint
    async with told_only(name) as (client, lines):
        await routes_by_prefix(client, name, f"{named_by}: {TEXT}")
        assert not any("--tokenizer" in line for line in lines)
        worker = await known(client)
        assert (worker["name"], worker["url"]) == (name, server.url)
        assert [rank["events"]["wire"] for rank in worker["ranks"]] == ["kvplug 1"] * 2
        assert [rank["events"]["hello"].get("dp_rank", 0) for rank in worker["ranks"]] == [0, 1]
