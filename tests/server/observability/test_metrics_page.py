"""docs/metrics.md has every metric that a running router exports, and no other."""

import json
import re
from contextlib import AsyncExitStack
from types import SimpleNamespace

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvplug.cluster.load_exchange import SyncCounts
from kvplug.cluster.replica_status import ReplicaStatus
from kvplug.cluster.sync import SyncStatus
from kvplug.protocol import WorkerHello
from kvplug.router.config import RouterConfig
from kvplug.server import service
from kvplug.server.config import ServerConfig, WorkerSpec
from kvplug.server.observability.cluster_metrics import ReplicaMetrics
from tests.documentation import PAGES, ROOT, name_of
from tests.server.engine import Engine, served

PAGE = (ROOT / "docs" / "metrics.md").read_text()
ROW = re.compile(r"^\| `(kvplug_\w+)` \| (\w+) \|([^|]*)\|", re.MULTILINE)


@pytest.fixture
async def families(monkeypatch):
    """{name: (type, labels)} of a router in front of an engine; /metrics has been scraped."""
    made = []

    class Metrics(service.Metrics):
        def __init__(self, *parts):
            super().__init__(*parts)
            made.append(self)

    monkeypatch.setattr(service, "Metrics", Metrics)
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(served(Engine()))
        worker = WorkerSpec(url=url, events="tcp://127.0.0.1:9")
        config = ServerConfig(
            workers=(worker,), port=0, router=RouterConfig(block_size=4), grace_s=0.2
        )
        router = await stack.enter_async_context(service.RouterService(config))
        client = await stack.enter_async_context(aiohttp.ClientSession(router.url))
        body = {"model": "m", "prompt": [1, 2, 3, 4, 5]}
        async with client.post("/v1/completions", json=body) as answer:
            assert answer.status == 200
        async with client.get("/metrics") as answer:
            scraped = {each.name for each in text_string_to_metric_families(await answer.text())}
        [metrics] = made
        collected = list(metrics._registry.collect())
    assert {each.name for each in collected} == scraped
    replica = SimpleNamespace(status=ReplicaStatus(router_id="a"))
    sync = SimpleNamespace(status=lambda: SyncStatus(True, {}, 0, SyncCounts()))
    embedded = SimpleNamespace(num_restarts=0)
    cluster = SimpleNamespace(replica=replica, sync=sync, embedded=embedded)
    collected += ReplicaMetrics(cluster).collect()
    return {exported(each): (each.type, tuple(each._labelnames)) for each in collected}


def exported(family):
    return family.name + ("_total" if family.type == "counter" else "")


async def test_the_page_has_every_metric_and_no_other(families):
    rows = ROW.findall(PAGE)
    documented = {name: (kind, tuple(re.findall(r"`(\w+)`", cell))) for name, kind, cell in rows}
    assert len(documented) == len(rows), "a metric is on the page twice"
    assert documented == families


# With --processes only (tests/server/processes/test_processes.py reads them).
OF_PROCESSES = {
    "kvplug_process_up",
    "kvplug_shared_reads_total",
    "kvplug_shared_reads_given_up_total",
    "kvplug_shared_news_missed_total",
}


async def test_the_dashboard_asks_for_metrics_and_labels_that_exist(families):
    dashboard = json.loads((ROOT / "examples" / "grafana.json").read_text())
    panels = dashboard["panels"]
    places = {(each["gridPos"]["x"], each["gridPos"]["y"]) for each in panels}
    assert len({each["id"] for each in panels}) == len(places) == len(panels)
    for target in (target for each in panels for target in each["targets"]):
        names = {name.removesuffix("_bucket") for name in re.findall(r"kvplug_\w+", target["expr"])}
        assert names <= families.keys()
        labels = {label for name in names for label in families[name][1]}
        assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= labels


async def test_metrics_named_elsewhere_exist(families):
    for page in PAGES:
        named = set(re.findall(r"\bkvplug_[a-z_]+\b(?!\*)", page.read_text()))
        for name in named - set(WorkerHello.__struct_fields__):
            known = (
                name in families
                or name in OF_PROCESSES
                or name.startswith("kvplug_forwarder_")  # tests/forwarder/test_process.py
                or any(each.startswith(name) for each in families)
            )
            assert known, f"{name_of(page)}: {name}"
