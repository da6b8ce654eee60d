"""What `make bench-outcome` is made of, and a run of it that is as small as it can be."""

import json
import math

import msgspec
import pytest
from aiohttp import web

from kvplug import codec
from kvplug.events import BlockRemoved, BlockStored, EventBatch, Namespace
from tests.benchmarks import outcome_ideal, outcome_workloads
from tests.benchmarks.outcome import OPEN_LOADS, cases_of
from tests.benchmarks.outcome_client import Answer, Closed, Open, _Client
from tests.benchmarks.outcome_engine import StockCodec
from tests.benchmarks.outcome_ideal import ideal_ttft_ms, new_tokens
from tests.benchmarks.outcome_report import Results, best_rps
from tests.benchmarks.outcome_requests import Ask, Writer, tokenize, tokenizer_folder
from tests.benchmarks.outcome_routers import ROUTERS
from tests.benchmarks.outcome_run import Case, Run, answers_per_s, run
from tests.benchmarks.outcome_stats import compare, geometric_interval
from tests.benchmarks.outcome_text import WordTokenizer
from tests.benchmarks.outcome_workloads import (
    Conversations,
    Documents,
    HotPrefix,
    Unshared,
    Workload,
)

CONVERSATIONS = Conversations(
    num_requests=30, num_live=6, num_turns=3, pause=3, system=20, turn=40, answer=20
)
MAKERS = {
    "documents": Documents(num_requests=12, num_documents=3, document=64, own=8, answer=2),
    "hot_prefix": HotPrefix(num_requests=12, prefix=64, own=8, answer=2, hot_share=0.5),
    "unshared": Unshared(num_requests=12, prompt=(20, 40), answer=2),
    "conversations": CONVERSATIONS,
}
TINY = Workload(
    name="tiny",
    num_engines=2,
    cache_tokens=12_288,
    clients=(2,),
    num_warm_up=2,
    is_bound=False,
    make=Documents(num_requests=24, num_documents=6, document=800, own=16, answer=1),
)
BY_NAME = {router.name: router for router in ROUTERS}


def make_run(router="kvplug", seed=1, **fields):
    values = {
        "workload": "w", "load": "c2", "form": "text", "router": router, "seed": seed, "rate": 0.0,
        "rps": 10.0, "ttft_mean": 100.0, "ttft_p90": 200.0, "total_mean": 300.0, "cached": 0.5,
        "failed": 0, "failure": "", "digest": "d", "wall_s": 1.0, "late_ms": 0.0,
        "cores": {"router": 0.1, "engines": 0.1, "client": 0.1},
    }  # fmt: skip
    return Run(**values | fields)


class TestRequests:
    @pytest.mark.parametrize("name", MAKERS)
    def test_the_same_seed_gives_the_same_bytes(self, name):
        first, second, other = (MAKERS[name](seed) for seed in (1, 1, 2))
        assert [ask.body("text") for ask in first] == [ask.body("text") for ask in second]
        assert [ask.body("text") for ask in first] != [ask.body("text") for ask in other]

    @pytest.mark.parametrize("name", MAKERS)
    def test_text_becomes_the_tokens_it_is_made_for_on_engines_too(self, name):
        engines = WordTokenizer(tokenizer_folder())
        for ask in MAKERS[name](1):
            body = msgspec.json.decode(ask.body("text"))
            on_engine = engines.chat(body) if "messages" in body else engines.completion(body)[0]
            assert list(ask.tokens) == tokenize(ask) == on_engine
            assert msgspec.json.decode(ask.body("ids"))["prompt"] == list(ask.tokens)

    def test_engines_tokenize_any_other_text_as_the_tokenizer_does(self):
        text = "No space before, and unheard-of words"
        [ids] = WordTokenizer(tokenizer_folder()).completion({"prompt": text})
        assert ids == tokenize(Ask(text, (), 1))
        chat = ({"role": "user", "content": text},)
        ids = WordTokenizer(tokenizer_folder()).chat({"messages": list(chat)})
        assert ids == tokenize(Ask(chat, (), 1))

    def test_a_turn_quotes_the_answer_to_the_last_one(self):
        asks = CONVERSATIONS(1)
        later = [ask for ask in asks if len(ask.text) > 2]
        assert later
        for ask in later:
            last = next(a for a in asks if a.text == ask.text[:-2])
            known = (*last.tokens, *last.answer)
            assert ask.tokens[: len(known)] == known

    def test_conversations_pause_between_turns(self):
        asks = CONVERSATIONS(1)
        texts = [ask.text for ask in asks]
        for number, text in enumerate(texts):
            if len(text) > 2:
                assert number - texts.index(text[:-2]) > CONVERSATIONS.pause


class TestTraces:
    def write(self, folder):
        lines = [
            {
                "input_length": 1100,
                "output_length": 40,
                "hash_ids": [0, 1 + number % 60, 100 + number],
            }
            for number in range(240)
        ]
        path = folder / "conversation_trace.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def test_whole_conversations_are_drawn_and_scaled_down(self, tmp_path):
        self.write(tmp_path)
        workloads, missing = outcome_workloads.all_workloads(tmp_path)
        asks = workloads[-1].make(1)
        assert {len(ask.tokens) for ask in asks} == {1 + 1100 // 16}
        assert {ask.max_tokens for ask in asks} == {40 // 16}
        assert len(asks) == workloads[-1].make.num_requests
        starts = [ask.tokens[: 1 + 64] for ask in asks]
        assert {starts.count(start) for start in starts} == {4}  # all turns of a conversation
        assert len(missing) == 1
        assert "synthetic_trace.jsonl is not there" in missing[0]

    def test_without_traces_they_are_skipped_by_name(self, tmp_path):
        workloads, missing = outcome_workloads.all_workloads(tmp_path)
        assert [sentence.split()[0] for sentence in missing] == list(outcome_workloads.TRACE_FILES)
        assert not {workload.name for workload in workloads} & set(outcome_workloads.TRACE_FILES)


class TestCases:
    def names(self, only):
        workloads, _ = outcome_workloads.all_workloads(tokenizer_folder())
        return [case.name for workload in workloads for case in cases_of(workload, only)]

    def test_closed_loops_come_before_the_open_ones_that_need_them(self):
        names = [name for name in self.names("") if name.startswith("docs8")]
        closed = ["docs8_c2", "docs8_c8", "docs8_ids_c2", "docs8_ids_c8"]
        assert names == closed + [f"docs8_{load}" for load in OPEN_LOADS]

    def test_only_takes_names_and_what_they_begin_with(self):
        assert self.names("fits_c8,docs8_ids") == ["docs8_ids_c2", "docs8_ids_c8", "fits_c8"]
        assert self.names("nobody") == []


class TestIdeal:
    def test_what_was_there_before_is_not_new(self):
        writer = Writer(1)
        document = writer.words(31)  # 32 tokens with the first one
        asks = [writer.completion(document + writer.words(8), 1) for _ in range(2)]
        assert new_tokens(asks) == [40, 8]
        assert new_tokens([writer.completion(document, 1)] * 2) == [32, 16]  # the last is computed

    def test_an_answer_is_there_for_the_next_turn(self):
        asks = CONVERSATIONS(1)
        number, turn = next((n, ask) for n, ask in enumerate(asks) if len(ask.text) == 4)
        last = next(ask for ask in asks if ask.text == turn.text[:-2])
        known = len(last.tokens) + len(last.answer)
        assert new_tokens(asks)[number] == len(turn.tokens) - known // 16 * 16

    def test_time_to_first_token_at_a_low_rate_is_that_of_one_step(self):
        asks = MAKERS["unshared"](1)
        ms = ideal_ttft_ms(asks, num_engines=2, num_warm_up=2, rate=0.1, seed=1)
        model = outcome_ideal.TIME_MODEL
        seconds = [
            model.step_s(num_prefill_tokens=len(ask.tokens), num_decodes=0) for ask in asks[2:]
        ]
        assert ms == pytest.approx(1e3 * (sum(seconds) / len(seconds) + 0.002))  # two hops


class TestStats:
    def test_the_interval_is_students(self):
        ratio, (low, high) = geometric_interval([1.0, math.e, math.e**2])
        assert ratio == pytest.approx(math.e)
        assert (math.log(low), math.log(high)) == pytest.approx(
            (1 - 4.303 / math.sqrt(3), 1 + 4.303 / math.sqrt(3))
        )

    def test_one_seed_says_nothing_of_the_interval(self):
        assert geometric_interval([2.0]) == (pytest.approx(2.0), (0.0, math.inf))

    def test_each_metric_has_its_best_peer_and_more_is_always_better(self):
        runs = [
            make_run(rps=30.0, ttft_mean=50.0),
            make_run("round_robin", rps=15.0, ttft_mean=100.0),
            make_run("smg_cache_aware", rps=10.0, ttft_mean=75.0),
        ]
        rps, ttft = compare(runs, "rps"), compare(runs, "ttft_mean")
        assert (rps.peer_name, rps.ratio) == ("round_robin", pytest.approx(2.0))
        assert (ttft.peer_name, ttft.ratio) == ("smg_cache_aware", pytest.approx(1.5))

    def test_kvplugs_other_costs_are_no_peers_and_failed_requests_no_work(self):
        runs = [make_run(), make_run("kvplug_weight_4", rps=99.0)]
        assert compare(runs, "rps") is None
        runs += [make_run("round_robin", rps=5.0), make_run("vllm_kv_aware", rps=50.0, failed=1)]
        assert compare(runs, "rps").peer_name == "round_robin"

    def test_only_seeds_that_all_have_are_paired(self):
        runs = [make_run(seed=seed, rps=10.0 * seed) for seed in (1, 2)]
        assert compare([*runs, make_run("round_robin", seed=2)], "rps").ratio == pytest.approx(2.0)

    @pytest.mark.parametrize(
        ("ours", "verdict"),
        [
            ((9.0, 9.0, 9.1), "worse"),
            ((10.5, 10.6, 10.7), "better"),
            ((9.9, 9.95, 10.0), "even"),
            ((5.0, 10.0, 20.0), "uncertain"),
        ],
    )
    def test_worse_is_what_even_the_good_end_is(self, ours, verdict):
        runs = [make_run(seed=seed, rps=rps) for seed, rps in enumerate(ours)]
        runs += [make_run("round_robin", seed=seed) for seed in range(3)]
        assert compare(runs, "rps").verdict == verdict


class TestRate:
    def test_answers_are_counted_from_the_last_one_of_the_warm_up(self):
        answers = [Answer(0.0, 0.1, total_s=end) for end in (1.0, 2.0, 2.5, 3.0)]
        assert answers_per_s(answers, 2) == pytest.approx(2 / 1.0)
        assert answers_per_s(answers, 0) == pytest.approx(4 / 3.0)

    def test_failures_are_no_answers(self):
        answers = [Answer(0.0, 0.1, total_s=1.0), Answer(0.0, failure="status 500")]
        assert answers_per_s(answers, 0) == pytest.approx(1.0)

    def test_open_loops_follow_the_best_routers_mean(self):
        runs = [make_run(rps=10.0), make_run(seed=2, rps=20.0), make_run("round_robin", rps=16.0)]
        assert best_rps(runs) == pytest.approx(16.0)


class TestResults:
    def test_what_was_measured_before_is_kept_until_it_is_measured_again(self, tmp_path):
        results = Results(tmp_path)
        for router in ("kvplug", "round_robin"):
            results.add(make_run(router))
            results.add(make_run(router, workload="other"))
        results = Results(tmp_path)
        results.forget("w_c2", ["kvplug", "round_robin"])
        for router, rps in (("kvplug", 20.0), ("round_robin", 5.0)):
            results.add(make_run(router, seed=7, rps=rps))
        results.summarize()
        summary = json.loads((tmp_path / "outcome.json").read_text())
        assert summary["w_c2_rps"] == {
            "kvplug": 20.0, "peer": 5.0, "peer_name": "round_robin", "ratio": 4.0,
            "interval": None, "unit": "requests/s",
        }  # fmt: skip
        assert summary["other_c2_ttft_p90"]["ratio"] == 1.0


class TestEvents:
    def test_an_event_has_the_fields_that_stock_vllm_writes(self):
        stored = BlockStored(
            block_hashes=(1,), token_ids=(5,) * 4, block_size=4, namespace=Namespace()
        )
        batch = EventBatch(events=(stored, BlockRemoved(block_hashes=(1,))), ts=1.0)
        payload = StockCodec.encode(batch)
        _, (first, second), _ = msgspec.msgpack.decode(payload)
        assert set(first) == {
            "type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id",
            "medium", "lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind",
        }  # fmt: skip
        assert set(second) == {"type", "block_hashes", "medium", "group_idx"}
        assert codec.decode(payload).events == batch.events


class TestClient:
    async def serve(self, handler):
        application = web.Application()
        application.add_routes([web.post("/v1/completions", handler)])
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return runner, "http://{}:{}".format(*runner.addresses[0])

    @pytest.mark.parametrize("load", [Closed(3), Open(500.0, 1, num_warm_up=4, clients=2)])
    async def test_all_requests_leave_in_their_order_and_are_read_to_the_end(self, load):
        async def answer(request):
            body = await request.json()
            usage = {"prompt_tokens": len(body["prompt"]), "prompt_tokens_details": None}
            chunks = [{"choices": [{"text": ""}]}, {"choices": [{"text": "a"}]}]
            chunks.append({"choices": [], "usage": usage})
            lines = [b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks]
            return web.Response(body=b": comment\n\n" + b"".join(lines) + b"data: [DONE]\n\n")

        runner, url = await self.serve(answer)
        asks = MAKERS["unshared"](1)
        sent = await _Client(url, asks, "ids").run(load)
        await runner.cleanup()
        assert sent.order == list(range(len(asks)))
        assert [a.prompt_tokens for a in sent.answers] == [len(ask.tokens) for ask in asks]
        assert all(0 < a.ttft_s <= a.total_s for a in sent.answers)

    async def test_an_answer_without_an_end_is_a_failure_with_its_reason(self):
        async def answer(request):
            return web.Response(status=503, text="nobody is there")

        runner, url = await self.serve(answer)
        sent = await _Client(url, MAKERS["unshared"](1)[:1], "ids").run(Closed(1))
        await runner.cleanup()
        assert sent.answers[0].failure == "status 503: nobody is there"


@pytest.mark.slow
class TestShortForm:
    def test_kv_finds_more_in_caches_than_round_robin_with_the_same_bytes(self):
        asks = TINY.make(1)
        case = Case(TINY, "c2", "text", seed=1)
        kv, turns = (run(case, asks, BY_NAME[name]) for name in ("kvplug", "round_robin"))
        assert kv.failed == turns.failed == 0
        assert kv.digest == turns.digest
        assert kv.cached > turns.cached
        for done in (kv, turns):
            assert 0 < done.ttft_mean <= done.total_mean
            # Two clients: an answer's time and the rate must fit together.
            assert done.rps * done.total_mean / 1e3 == pytest.approx(2, rel=0.25)
