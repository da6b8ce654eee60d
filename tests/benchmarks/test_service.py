"""What `make bench-service` is made of, and a run of it that is as small as it can be."""

import json

import pytest

from tests.benchmarks import service_report
from tests.benchmarks.service import SHORT, _measure
from tests.benchmarks.service_client import Answer, Closed, Open, post, send
from tests.benchmarks.service_engine import END, STREAM_HEAD, TOKEN
from tests.benchmarks.service_report import TARGETS, Results, Target
from tests.benchmarks.service_routers import CONTESTANTS, DIRECT, cheap_fleet
from tests.benchmarks.service_run import Measured

BY_NAME = {each.name: each for each in CONTESTANTS}
STREAM = post(b'{"prompt": "a", "max_tokens": 3, "stream": true}')
WHOLE = post(b'{"prompt": "a", "max_tokens": 3}')


@pytest.fixture(scope="module")
def urls(tmp_path_factory):
    with cheap_fleet(tmp_path_factory.mktemp("engines")) as fleet:
        fleet.wait_ready()
        yield [engine.endpoint.url for engine in fleet.engines]


@pytest.mark.slow
class TestEnginesAndClient:
    def test_a_stream_has_a_chunk_for_each_token_and_its_end(self, urls):
        [answer] = send(urls, [STREAM], Open(1000.0))
        assert answer.received == STREAM_HEAD + 3 * TOKEN + END
        assert answer.num_chunks == 3 + 2  # the finish and the usage
        assert answer.usage() == (1, 0)
        assert 0 < answer.ttft_s < answer.total_s

    def test_what_is_not_streamed_is_one_chunk(self, urls):
        answers = send(urls, [WHOLE] * 8, Open(1000.0))
        assert {each.failure for each in answers} == {""}
        assert all(b'"text":" word"' in each.received for each in answers)

    def test_a_closed_loop_ends(self, urls):
        answers = send(urls, [STREAM, WHOLE], Closed(clients=4, duration_s=0.2))
        assert len(answers) >= 8
        assert {each.failure for each in answers} == {""}

    def test_what_is_no_200_is_a_failure(self, urls):
        [answer] = send(urls, [post(b"{}", "/nowhere")], Open(1000.0))
        assert answer.failure.startswith("HTTP/1.1 404")


def test_nobody_there_is_a_failure():
    [answer] = send(["http://127.0.0.1:9"], [WHOLE], Open(1000.0))
    assert "refused" in answer.failure


def test_a_stream_that_lacks_chunks_is_a_failure():
    measured = Measured()
    whole = Answer(0.1, 0.2, 3 * b"data: {")
    assert measured.good([whole, Answer(0.1, 0.2, b"data: {")], 3) == [whole]
    assert measured.failed == 1
    assert measured.failure.startswith("1 chunks")


class TestTargets:
    def test_the_best_peer_counts(self):
        summary = {"ours": {"x": 4.0}, "slow": {"x": 5.0}, "fast": {"x": 2.0}, "none": {}}
        lower = Target("x", "ours", ["slow", "fast", "none"], 1.5, lower_is_better=True)
        assert (lower.row(summary)["peer_name"], lower.row(summary)["met"]) == ("fast", False)
        higher = Target("x", "ours", ["slow", "fast"], 0.5)
        assert (higher.row(summary)["peer_name"], higher.row(summary)["met"]) == ("slow", True)

    def test_what_was_not_measured_is_not_judged(self):
        target = Target("x", "ours", ["peer"], 1.0)
        assert target.row({"ours": {"x": 1.0}}) is None
        assert target.row({"peer": {"x": 1.0}}) is None

    def test_all_are_about_routers_and_columns_that_there_are(self):
        columns = {key for key, _, _ in service_report.COLUMNS}
        for target in TARGETS:
            assert {target.contestant, *target.peers} <= set(BY_NAME)
            assert target.metric in columns


class TestResults:
    def test_what_a_router_adds_is_compared_within_its_round(self, tmp_path):
        results = Results(tmp_path, tokenize_ms={"kvplug": 5.0})
        for turn in (0, 1, 2):  # the machine gets slower
            for name, ms in ((DIRECT, 1.0), ("kvplug_kv", 3.0)):
                numbers = {f"ids_p{each}": ms + 10.0 * turn for each in (50, 90, 99)}
                results.add(name, Measured(numbers))
        results.write({"rounds": 3})
        kept = json.loads((tmp_path / "service.json").read_text())["routers"]
        assert kept["kvplug_kv"]["added_p50_ids"] == {"value": 2.0, "low": 2.0, "high": 2.0}
        assert kept["kvplug_kv"]["ids_p90"] == {"value": 13.0, "low": 3.0, "high": 23.0}
        assert kept["kvplug_kv"]["failed"] == 0


@pytest.mark.slow
def test_the_short_form_measures_all(tmp_path):
    results = Results(tmp_path, tokenize_ms={"kvplug": 5.0})
    _measure(BY_NAME["kvplug_kv"], SHORT, 0, results)
    [numbers] = results.rounds("kvplug_kv")
    assert results.failed == {"kvplug_kv": 0}
    for key, _, _ in service_report.COLUMNS:
        assert key.startswith("added_") or numbers[key] > 0, key
