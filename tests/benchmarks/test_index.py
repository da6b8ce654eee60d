"""What `make bench-index` and `make soak-index` are made of; none of it needs the peer."""

import json
import random

import msgspec
import numpy as np
import pytest

from kvplug import packed, protocol
from kvplug.engines.life import Life
from kvplug.events import BlockRemoved, EventBatch
from kvplug.protocol import WorkerHello
from tests.benchmarks import (
    index,
    index_dynamo_events,
    index_trace,
    index_workload,
    ingest_packed,
)
from tests.benchmarks.index_kvplug import Kvplug
from tests.benchmarks.index_metrics import Metric, all_metrics
from tests.benchmarks.index_report import merged, row_of
from tests.benchmarks.index_side import Bench, replayed_singly
from tests.benchmarks.index_trace import QUERY, REMOVED, STORED, Operation
from tests.benchmarks.index_workload import Chain, Removed, Stored
from tests.benchmarks.soak_engine import Conversations, Engine
from tests.benchmarks.soak_index import Sample, Soak, grown

RATE = Metric("store_call_16", 4, "rate", 2, ({},))
STORE = {"chains": 1, "workers": 2, "blocks_per_event": 1024, "events_per_call": 2}
LATENCY = Metric("match_list_2048_w64", 1, "latency", 2, ({},))


def rounds(*elapsed_ns):
    return [{"num_blocks": 1000, "elapsed_ns": ns, "calls_ns": [ns, ns]} for ns in elapsed_ns]


class TestTrace:
    def test_a_request_asks_stores_what_is_missing_and_evicts_ends_first(self):
        ops = index_trace.operations([[0, 1], [0, 2]], num_workers=1, blocks_per_id=2, capacity=5)
        assert ops == [
            Operation(QUERY, 0, 0, [1, 2, 3, 4]),
            Operation(STORED, 0, 0, [1, 2, 3, 4]),
            Operation(QUERY, 0, 0, [1, 2, 5, 6]),
            Operation(STORED, 0, 2, [5, 6]),
            Operation(REMOVED, 0, 0, [4]),
        ]

    def test_requests_are_read_from_json_lines(self, tmp_path):
        lines = [{"timestamp": 0, "hash_ids": [0, 1]}, {"timestamp": 3, "hash_ids": [2]}]
        path = tmp_path / "trace.jsonl"
        path.write_text("\n".join(map(json.dumps, lines)))
        assert index_trace.read_requests(path) == [[0, 1], [2]]

    def test_workers_are_chosen_by_the_number_of_the_request(self):
        ops = index_trace.operations([[i] for i in range(50)])
        queries = [op.worker for op in ops if op.kind == QUERY]
        assert queries == [(i * 2654435761 >> 16) % 8 for i in range(50)]

    def test_events_name_blocks_and_parents_alike(self):
        ops = index_trace.operations([[0], [0, 1]], num_workers=1, blocks_per_id=1)
        _, first, asked, second = index_trace.as_events(ops)
        assert second.parent == first.names[0]
        assert asked.hashes == first.hashes + second.hashes

    def test_the_index_replays_it_as_plain_sets_do(self):
        rng = random.Random(3)
        requests = [
            [10 * rng.randrange(4) + i for i in range(rng.randint(1, 9))] for _ in range(80)
        ]
        ops = index_trace.operations(requests, capacity=24)
        held, depths = [set() for _ in range(8)], []
        for op in ops:
            if op.kind == QUERY:
                depths.append([leading(op.blocks, blocks) for blocks in held])
            else:
                {STORED: held[op.worker].update, REMOVED: held[op.worker].difference_update}[
                    op.kind
                ](op.blocks)
        expected = [sum(map(sum, depths)), sum(map(max, depths))]
        assert replayed_singly(Kvplug(8), steps_of(ops))[2] == expected


def leading(blocks, held):
    return next((i for i, block in enumerate(blocks) if block not in held), len(blocks))


def steps_of(ops):
    for event in index_trace.as_events(ops):
        if isinstance(event, index_trace.Asked):
            yield True, Kvplug.query(event.hashes, "array")
        else:
            yield False, next(Kvplug.calls([event], 1))


class TestWorkload:
    def test_numbers_are_splitmix64_of_chain_and_place(self):
        chain = Chain(3, 2)
        assert chain.hashes[1] == index_workload.splitmix64(0x1111_0000_0000_0000 ^ 3 << 24 ^ 1)
        assert chain.names[1] == index_workload.splitmix64(0x2222_0000_0000_0000 ^ 3 << 24 ^ 1)

    def test_removals_start_at_the_end(self):
        first = next(Chain(0, 4).removed(0, 3))
        assert first == Removed(0, Chain(0, 4).names[:0:-1])

    @pytest.mark.parametrize(("shape", "deepest"), [("all", 8), ("staggered", 8), ("branching", 8)])
    def test_depths_are_right(self, shape, deepest):
        _, query, depths = index_workload.held(shape, 4, 8)
        assert query == Chain(0, 8).hashes
        assert depths[3] == deepest
        assert depths[0] == (8 if shape == "all" else 2)

    def test_a_fill_has_as_many_blocks_as_it_is_asked_for(self):
        events = [e for chain in index_workload.fill(5000, 2) for e in chain]
        assert sum(len(e.names) for e in events) == 10_000
        assert len({name for e in events for name in e.names}) == 5000

    def test_both_sides_get_the_same_events(self):
        events = [*index_workload.stores(2, 2, 1024), *index_workload.removals(2, 1024)]
        ours = [event for _, payload in Kvplug.calls(events, 3) for event in unpacked(payload)]
        assert ours == [parsed(index_dynamo_events.encode(event)) for event in events]

    def test_a_call_has_the_events_of_one_worker(self):
        calls = list(Kvplug.calls(index_workload.stores(1, 2, 512), 3))
        assert [(rank.worker, len(unpacked(payload))) for rank, payload in calls] == [
            ("w0", 3),
            ("w0", 1),
            ("w1", 3),
            ("w1", 1),
        ]


def test_payloads_are_those_of_a_publisher():
    """For the same blocks, byte by byte."""
    batches = list(ingest_packed.batches(seed=1, blocks_per_event=16, num_blocks=2048))
    life = Life(WorkerHello(block_size=16))
    *_, message = life.apply(batches[:4])  # behind a hello
    said = protocol.decode(message.payload).packed
    events = [
        Stored(0, event.parent, event.engine_hashes.tolist(), event.hashes.tolist())
        for event in packed.decode(said)
    ]
    events += [Removed(0, events[-1].names)]
    *_, removal = life.apply([removed_batch(events[-1].names)])
    payloads = [payload for _, payload in Kvplug.calls(events[:4], 4)]
    payloads += [payload for _, payload in Kvplug.calls(events[4:], 4)]
    assert payloads == [said, protocol.decode(removal.payload).packed]


def removed_batch(names):
    return EventBatch(events=(BlockRemoved(block_hashes=tuple(names)),))


def unpacked(payload):
    """[parent, names, hashes] or [names] of each event."""
    result = []
    for kind, _, *rest in msgspec.msgpack.decode(payload)[1:]:
        *parent, names = rest if kind else (rest[0], *rest[2:])[:2]
        arrays = [names] if kind else [names, rest[3]]
        result.append([*parent, *(np.frombuffer(a, dtype="<u8").tolist() for a in arrays)])
    return result


def parsed(payload):
    """As unpacked."""
    body = json.loads(payload)["data"]
    if "removed" in body:
        return [body["removed"]["block_hashes"]]
    stored = body["stored"]
    names = [block["block_hash"] for block in stored["blocks"]]
    return [stored["parent_hash"], names, [block["tokens_hash"] for block in stored["blocks"]]]


class TestSide:
    """Each kind of case, as small as it goes."""

    def test_store(self):
        answer = Bench(Kvplug).measure({"what": "store", **STORE})
        assert answer["check"] == [2 * index_workload.CHAIN_BLOCKS]
        assert len(answer["calls_ns"]) == 2

    def test_remove(self):
        answer = Bench(Kvplug).measure({"what": "remove", **STORE, "workers": 1})
        assert answer["check"] == [0]

    @pytest.mark.parametrize("form", ["array", "list"])
    @pytest.mark.parametrize("shape", ["all", "staggered", "branching"])
    def test_match(self, shape, form):
        asked = {"what": "match", "shape": shape, "workers": 4, "blocks": 16, "form": form}
        answer = Bench(Kvplug).measure({**asked, "calls": 2})
        assert answer["check"] == (64 if shape == "all" else 40)
        assert len(answer["calls_ns"]) == 2

    def test_hash_is_the_same_from_a_list_and_an_array(self):
        case = {"what": "hash", "tokens": 64, "calls": 1}
        array, list_ = (Bench(Kvplug).measure({**case, "form": f}) for f in ("array", "list"))
        assert array["check"] == list_["check"]
        assert len(set(array["check"])) == 4

    def test_memory(self):
        answer = Bench(Kvplug).measure({"what": "memory", "workers": 1, "blocks": 2048})
        assert answer["table_bytes"] > 2048 * 16


class TestReport:
    def test_a_rate_is_better_if_larger(self):
        row = row_of(RATE, rounds(100, 50, 40), rounds(200, 200, 200))
        assert row.as_json() == {
            "kvplug": 20_000.0,
            "peer": 5000.0,
            "ratio": 4.0,
            "target": 4,
            "unit": "M packed blocks/s",
            "spread": [2.0, 5.0],
        }

    def test_a_latency_is_better_if_smaller(self):
        row = row_of(LATENCY, rounds(1000, 1000), rounds(3000, 5000))
        assert (row.kvplug, row.peer, row.ratio, row.spread) == (1.0, 4.0, 4.0, (3.0, 5.0))

    def test_memory_is_that_of_the_worst_fill_and_the_larger_reading(self):
        cases = ({"blocks": 10}, {"blocks": 10})
        metric = Metric("memory_distinct", 1.5, "memory", 1, cases)
        ours = [
            {"table_bytes": 300, "resident_bytes": 200},
            {"table_bytes": 200, "resident_bytes": 400},
        ]
        row = row_of(metric, ours, [{"resident_bytes": 600}] * 2)
        assert (row.kvplug, row.peer, row.ratio, row.spread) == (40.0, 60.0, 1.5, (1.5, 2.0))
        assert len(row.details) == 2

    def test_what_was_not_measured_stays_in_the_file(self):
        row = row_of(RATE, rounds(100), rounds(100))
        before = {"hash_list_32k": {"ratio": 1}, RATE.name: {"ratio": 9}, "also": {"a": 1, "b": 1}}
        after = merged(before, [row], {"b": 2})
        assert after["hash_list_32k"] == {"ratio": 1}
        assert after[RATE.name]["ratio"] == 1.0
        assert after["also"] == {"a": 1, "b": 2}

    @pytest.mark.parametrize(("ours", "theirs"), [([1, 2], [1, 3]), ([1, 2], [1, 2])])
    def test_other_answers_than_expected_end_it(self, ours, theirs, tmp_path):
        metric = all_metrics(tmp_path)["replay_synthetic"]
        with pytest.raises(SystemExit, match="replay_synthetic: the answers are not the same"):
            index.agree(metric, ours, theirs)

    def test_metrics_without_their_trace_are_left_out(self, tmp_path, capsys):
        (tmp_path / "synthetic_trace.jsonl").touch()
        names = [m.name for m in index.measurable(list(all_metrics(tmp_path).values()))]
        assert len(names) == 15
        assert "replay_conversation" not in names
        assert "skipped replay_conversation" in capsys.readouterr().out

    def test_every_metric_has_a_target(self, tmp_path):
        metrics = all_metrics(tmp_path)
        assert len(metrics) == 16
        assert all(metric.target >= 1 and metric.cases for metric in metrics.values())


class TestSoak:
    def test_what_an_engine_holds_has_its_parents(self):
        rng = random.Random(0)
        conversations, engine, held = Conversations(rng), Engine(0, 600), {}
        for _ in range(200):
            for event in engine.serve(conversations.next()):
                if isinstance(event, Stored):
                    assert event.parent is None or event.parent in held
                    held |= dict.fromkeys(event.names)
                else:
                    for name in event.names:
                        del held[name]
        assert len(held) == len(engine) == 600

    def test_some_steps_leave_the_index_sound(self):
        soak = Soak(seed=1)
        for _ in range(200):
            soak.step()
        soak.check()
        assert soak.num_queries > 20

    def test_growth_is_named(self):
        flat = [Sample(s, 0, 0, 100, 100) for s in range(10)]
        assert grown(flat, 9) == []
        leaking = [*flat[:-1], Sample(9, 0, 0, 100, 106)]
        assert grown(leaking, 9) == ["resident_bytes grew from 100 to 106: 6.0%"]
