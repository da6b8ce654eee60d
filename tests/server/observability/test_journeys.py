"""What a request leaves behind: ids, headers, times, lines of the log, spans."""

import asyncio
import json
import logging
import os
import subprocess
import sys

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from prometheus_client.parser import text_string_to_metric_families

from kvplug.errors import ConfigError
from kvplug.server import service as service_module
from kvplug.server.observability import request_log
from kvplug.server.observability.histogram import SHARE, Histogram
from kvplug.server.observability.journey import current, requests_logger
from kvplug.server.observability.tracing import NoTracer, OtelTracer, tracer_of
from tests.server.engine import Engine
from tests.server.test_service import COMPLETION, routing
from tests.waiting import until

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
STREAM = {**COMPLETION, "stream": True}


async def post(client, body=COMPLETION, **headers):
    """(headers of the answer, its body)."""
    async with client.post("/v1/completions", json=body, headers=headers) as response:
        return response.headers, await response.read()


@pytest.mark.parametrize("body", [COMPLETION, STREAM, {"model": "unknown"}])
async def test_an_id_is_taken_or_made_and_goes_both_ways(body):
    engine, said = Engine(), set()
    async with routing(engine) as (_, client):
        for given_id in ("my-id:1", "!" * 128, "!" * 129, "two words", ""):
            headers, _ = await post(
                client, body, **({"X-Request-Id": given_id} if given_id else {})
            )
            [request_id] = headers.getall("X-Request-Id")
            is_kept = given_id in ("my-id:1", "!" * 128)
            assert request_id == given_id if is_kept else len(request_id) == 32
            said.add(request_id)
            if body["model"] == "m":
                assert engine.last_headers.getall("X-Request-Id") == [request_id]
    assert len(said) == 5


async def test_a_trace_passes_untouched_where_nobody_traces():
    engine = Engine()
    async with routing(engine) as (_, client):
        await post(client, traceparent=TRACEPARENT, tracestate="a=b")
        assert engine.last_headers["traceparent"] == TRACEPARENT
        assert engine.last_headers["tracestate"] == "a=b"
        await post(client)
        assert "traceparent" not in engine.last_headers


@pytest.fixture
def spans(monkeypatch):
    """The spans that the router has ended, in memory."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(service_module, "tracer_of", lambda *_: OtelTracer(provider))
    return exporter


async def test_the_engines_span_is_a_child_of_the_routers_and_that_of_the_clients(spans):
    engine = Engine()
    async with routing(engine) as (service, client):
        await post(client, STREAM, traceparent=TRACEPARENT, tracestate="a=b")
        await until(spans.get_finished_spans, "the span has ended")
        [worker] = service.fleet.workers
    [span] = spans.get_finished_spans()
    trace_id, span_id = span.context.trace_id, span.context.span_id
    assert f"{trace_id:032x}" == TRACEPARENT.split("-")[1]
    assert f"{span.parent.span_id:016x}" == TRACEPARENT.split("-")[2]
    assert engine.last_headers.getall("traceparent") == [f"00-{trace_id:032x}-{span_id:016x}-01"]
    assert engine.last_headers.getall("tracestate") == ["a=b"]
    assert span.name == "POST /v1/completions"
    attributes = dict(span.attributes)
    assert attributes["kvplug.worker"] == worker
    assert attributes["gen_ai.request.model"] == "m"
    assert attributes["gen_ai.usage.input_tokens"] == 5
    assert (attributes["kvplug.cached_tokens"], attributes["kvplug.tries"]) == (0, 1)
    assert attributes["http.response.status_code"] == 200
    assert "kvplug.cost" in attributes


async def test_a_failed_request_is_a_failed_span_of_a_trace_of_its_own(spans):
    engine = Engine()
    engine.behaviour = "die"
    async with routing(engine) as (_, client):
        await post(client, traceparent="no traceparent")
    [span] = spans.get_finished_spans()
    assert (span.parent, span.status.status_code) == (None, StatusCode.ERROR)


def test_tracing_is_asked_for_by_a_flag_or_the_standard_variables(monkeypatch):
    assert isinstance(tracer_of(None, {}), NoTracer)
    variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}
    assert isinstance(tracer_of(None, variables | {"OTEL_SDK_DISABLED": "true"}), NoTracer)
    for tracer in (tracer_of("http://127.0.0.1:9", {}), tracer_of(None, variables)):
        assert isinstance(tracer, OtelTracer)
        tracer.stop()
    for name in [name for name in sys.modules if name.startswith("opentelemetry")]:
        monkeypatch.setitem(sys.modules, name, None)
    assert isinstance(tracer_of(None, variables), NoTracer)
    with pytest.raises(ConfigError, match=r"pip install 'kvplug\[otel\]'"):
        tracer_of("http://127.0.0.1:9", {})


async def test_decisions_are_explained_if_the_operator_wants_it():
    for explains in (False, True):
        async with routing(Engine(), explain_headers=explains) as (service, client):
            for body in (COMPLETION, STREAM):
                headers, _ = await post(client, body)
                said = {name.lower() for name in headers if name.lower().startswith("x-kvplug")}
                words = ("worker", "overlap", "cost", "reason")
                assert said == ({f"x-kvplug-{word}" for word in words} if explains else set())
            if explains:
                assert headers["x-kvplug-worker"] in service.fleet.workers
                assert headers["x-kvplug-overlap"] == "4"  # a block of the first request
                assert headers["x-kvplug-reason"] == "prefix"
                float(headers["x-kvplug-cost"])


async def samples_of(client):
    """{(name, label): value} of /metrics, of families with at most one label."""
    async with client.get("/metrics") as response:
        families = text_string_to_metric_families(await response.text())
        return {
            (sample.name, *sample.labels.values()): sample.value
            for family in families
            for sample in family.samples
        }


async def test_each_step_of_a_request_is_timed_once():
    engine = Engine()
    engine.behaviour = "gated"
    async with routing(engine) as (service, client):
        [worker] = service.fleet.workers
        async with client.post("/v1/completions", json=STREAM) as response:
            await response.content.readline()
            loaded = await samples_of(client)
            assert loaded["kvplug_load_requests", worker] == 1
            assert loaded["kvplug_load_waiting_requests", worker] == 0
            assert loaded["kvplug_load_active_blocks", worker] == 1
            engine.gate.set()
            await response.read()
        await post(client, {"model": "unknown"})
        found = await samples_of(client)
    for step in ("tokenize", "decide", "connect", "answer"):
        assert found["kvplug_request_step_seconds_count", step] == 1
    assert found["kvplug_request_step_seconds_count", "read"] == 2
    assert found["kvplug_time_to_first_token_seconds_count",] == 1
    assert found["kvplug_request_seconds_count",] == 2
    assert found["kvplug_predicted_cached_share_bucket", "0.0"] == 1
    assert (found["kvplug_answers_total", "200"], found["kvplug_answers_total", "404"]) == (1, 1)
    assert found["kvplug_load_requests", worker] == 0


async def test_a_client_that_leaves_is_counted_as_such():
    engine = Engine()
    engine.behaviour = "slow"
    async with routing(engine) as (service, client):
        async with client.post("/v1/completions", json=STREAM) as response:
            await response.content.readline()
            response.close()
        times = service.following.times
        await until(lambda: times.num_by_status, "the request is over")
        assert dict(times.num_by_status) == {499: 1}


async def test_the_log_has_a_line_of_each_request_without_what_is_secret(caplog):
    engine = Engine()
    engine.usage = {"prompt_tokens": 2, "completion_tokens": 7}
    caplog.set_level(logging.INFO, logger=requests_logger.name)
    async with routing(engine) as (service, client):
        [worker] = service.fleet.workers
        path = "/v1/completions?key=secret-query"
        headers = {"Authorization": "Bearer secret-key", "X-Request-Id": "my-id"}
        body = {"model": "m", "prompt": "secret-prompt", "stream": True}
        async with client.post(path, json=body, headers=headers) as response:
            await response.read()
        own = [record for record in caplog.records if record.name == requests_logger.name]
    [record] = own
    for formatter in (request_log.JsonLines(), request_log.TextLines()):
        assert "secret" not in formatter.format(record)
    entry = json.loads(request_log.JsonLines().format(record))
    assert entry["request_id"] == "my-id"
    assert (entry["path"], entry["status"], entry["worker"]) == ("/v1/completions", 200, worker)
    assert (entry["model"], entry["tries"], entry["tokens"]) == ("m", 1, 7)
    assert entry["total_ms"] >= entry["first_token_ms"] > 0
    assert "request request_id=my-id status=200" in request_log.TextLines().format(record)


def test_a_line_of_json_has_the_traceback_of_an_error():
    try:
        json.loads("{")
    except ValueError:
        record = logging.LogRecord("x", logging.ERROR, "", 0, "%s", ("it",), sys.exc_info())
    line = request_log.JsonLines().format(record)
    assert "\n" not in line
    entry = json.loads(line)
    assert (entry["level"], entry["message"]) == ("error", "it")
    assert "JSONDecodeError" in entry["traceback"].splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize(("logs_requests", "num_lines"), [(True, 2), (False, 1)])
def test_configured_logging_writes_lines_of_json(logs_requests, num_lines):
    code = (
        "import logging; from kvplug.server.observability import request_log as log;"
        f"log.configure('json', 'warning', logs_requests={logs_requests});"
        "logging.getLogger('a').warning('w'); logging.getLogger('a').info('i');"
        "log.requests_logger.info('request', extra={'facts': {'status': 200}})"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ
    )
    entries = [json.loads(line) for line in ran.stderr.splitlines()]
    assert [entry["message"] for entry in entries] == ["w", "request"][:num_lines]


async def test_outside_of_a_request_nothing_is_noted():
    assert current().headers == {}
    assert current().answer_headers == {}


async def test_requests_at_once_keep_their_own_journeys():
    engine = Engine()
    async with routing(engine) as (_, client):
        answers = await asyncio.gather(
            *(post(client, STREAM, **{"X-Request-Id": str(number)}) for number in range(50))
        )
    assert [headers["X-Request-Id"] for headers, _ in answers] == [str(n) for n in range(50)]


@given(st.lists(st.floats(-1, 2)))
def test_a_bucket_counts_what_is_not_above_its_bound(values):
    histogram = Histogram(SHARE)
    for value in values:
        histogram.add(value)
    bounds = [*SHARE, float("inf")]
    naive = [float(sum(value <= bound for value in values)) for bound in bounds]
    assert [count for _, count in histogram.buckets] == naive
    assert [float(bound) for bound, _ in histogram.buckets] == bounds


async def test_an_engines_own_id_is_not_said_twice():
    async def says_an_id(request):
        return aiohttp.web.json_response({}, headers={"x-request-id": "the engine's"})

    engine = Engine()
    engine.generate = says_an_id
    async with routing(engine) as (_, client):
        headers, _ = await post(client, **{"X-Request-Id": "mine"})
        assert headers.getall("X-Request-Id") == ["mine"]
