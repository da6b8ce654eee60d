import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplug.kernels import costing
from kvplug.kernels._jit import f8, i8, kernel, reads, void, writes
from tests.kernels import references

loads = st.lists(
    st.tuples(st.floats(0, 100), st.floats(0, 100), st.integers(0, 50), st.integers(0, 10)),
    max_size=6,
)
COLUMNS = references.RANK_COLUMNS
TRAFFIC = (
    *("num_routed", "last_ms", "gap_ms", "work_ms", "prompt_blocks", "cached_blocks"),
    *("answer_tokens", "answer_ms", "distinct_blocks", "held_blocks", "usual_capacity"),
)
counts = st.integers(0, 40).map(float)
ranks = st.lists(
    st.fixed_dictionaries(
        {name: counts if name.startswith("num") else st.floats(0, 200) for name in COLUMNS}
        | {"noted_ms": st.just(costing.NEVER_MS) | st.floats(-30_100, 0)}
        | {"resident_blocks": st.just(costing.UNKNOWN_BLOCKS) | st.floats(0, 200)}
    ),
    min_size=1,
    max_size=5,
)
traffics = st.fixed_dictionaries({name: st.floats(0, 100) for name in TRAFFIC})


@kernel(f8(f8, i8, f8, reads(f8), i8))
def blocks_cost(prompt_blocks, num_full_blocks, weight, load, active_depth):
    return costing.blocks_cost(
        prompt_blocks, num_full_blocks, weight, load[0], load[1], load[2], active_depth
    )


def blocks_costs(prompt_blocks, num_full_blocks, weight, *loads):
    """Of ranks, by their credit, blocks to prefill, active blocks, and active depth."""
    return [
        blocks_cost(prompt_blocks, num_full_blocks, weight, np.array(load, dtype=float), depth)
        for *load, depth in zip(*loads, strict=True)
    ]


@kernel(void(reads(f8), reads(f8), reads(i8), reads(f8), reads(f8), writes(f8)))
def fill_fleet_costs(ranks, traffic, candidates, request, found, out):
    """request: the time, tokens, tokens per block, and how long the answer may get.

    found: a row of each rank; out: the waits of all, then what each costs itself and the fleet.
    """
    n, now_ms = len(candidates), request[0]
    prompt = costing.Prompt(request[1], request[1] // request[2], request[2], request[3])
    waits = out[:n]
    costing.fill_waits(ranks, now_ms, waits)
    fleet = costing.fleet_of(ranks, traffic, candidates, prompt, waits, now_ms)
    for rank in range(n):
        mine = costing.Found(found[3 * rank], found[3 * rank + 1], found[3 * rank + 2])
        times = costing.times_of(ranks, rank, prompt, fleet, waits[rank], mine)
        out[n + rank], out[2 * n + rank] = times.own, times.fleet


@given(st.floats(0, 50), st.integers(0, 50), st.floats(0, 4), loads)
def test_the_cost_in_blocks_is_the_formula(prompt_blocks, num_full_blocks, weight, ranks):
    credit, prefill, active, active_depth = (
        (list(c) for c in zip(*ranks, strict=True)) if ranks else ([], [], [], [])
    )
    request = prompt_blocks, num_full_blocks, weight
    costs = blocks_costs(*request, credit, prefill, active, active_depth)
    expected = references.blocks_cost(*request, credit, prefill, active, active_depth)
    np.testing.assert_allclose(costs, expected)


def test_the_worked_example_of_the_specification():
    # Three workers with 8, 5, 2 blocks to prefill and 10, 5, 9 to decode: the second one wins.
    credit, active, nothing = (2, 5, 8), (10, 5, 9), (0, 0, 0)
    assert blocks_costs(10.0, 0, 1.0, credit, nothing, active, nothing) == [18.0, 10.0, 11.0]


def fleet_costs(ranks, traffic, now_ms, num_tokens, size, max_answer, found):
    columns = np.array([[rank[name] for name in COLUMNS] for rank in ranks], dtype=float)
    request = np.array([now_ms, num_tokens, size, max_answer], dtype=float)
    out = np.empty((3, len(ranks)))
    fill_fleet_costs(
        columns.reshape(-1), np.array([traffic[name] for name in TRAFFIC]), np.arange(len(ranks)),
        request, np.array(found, dtype=float).reshape(-1), out.reshape(-1),
    )  # fmt: skip
    return out


@given(
    ranks,
    traffics,
    st.floats(0, 300),
    st.integers(1, 100),
    st.sampled_from([1, 4, 16]),
    st.floats(0, 50) | st.just(np.inf),
    st.data(),
)
def test_the_cost_in_ms_is_the_formula(ranks, traffic, now_ms, num_tokens, size, answer, data):
    blocks = st.integers(0, num_tokens // size)
    found = [(*sorted(data.draw(st.tuples(blocks, blocks)))[::-1], 3.5) for _ in ranks]
    waits, own, cost = fleet_costs(ranks, traffic, now_ms, num_tokens, size, answer, found)
    expected = references.fleet_costs(ranks, traffic, now_ms, num_tokens, size, answer, found)
    np.testing.assert_allclose(waits, references.waits_ms(ranks, now_ms), atol=1e-9)
    np.testing.assert_allclose(np.stack([own, cost], axis=1), expected, rtol=1e-9, atol=1e-9)


def rank_with(**values):
    defaults = {"token_ms": 0.1, "capacity_blocks": 100.0}
    return dict.fromkeys(COLUMNS, 0.0) | defaults | values


NOTHING, MOST = (0, 0, 0), (50, 50, 0)
QUIET = dict.fromkeys(TRAFFIC, 0.0) | {"gap_ms": 1e9}


def test_the_worked_example_of_the_docs():
    """docs/routing.md, "A worked example": change both together."""
    holder = rank_with(
        resident_blocks=100.0, waiting_ms=60.0, first_ms=60.0, num_waiting=1.0, num_running=3.0,
        coming_blocks=25.0, busy_ms=10.0, fixed_ms=2.0, sequence_ms=0.1, usual_wait_ms=12.0,
    )  # fmt: skip
    other = rank_with(resident_blocks=100.0, fixed_ms=2.0, sequence_ms=0.1, usual_wait_ms=6.0)
    traffic = dict.fromkeys(TRAFFIC, 0.0) | {
        "gap_ms": 20.0, "work_ms": 20.0, "prompt_blocks": 100.0, "cached_blocks": 80.0,
        "answer_tokens": 32.0, "distinct_blocks": 100.0, "held_blocks": 80.0,
    }  # fmt: skip
    _, own, cost = fleet_costs([holder, other], traffic, 0.0, 816, 16, np.inf, [MOST, NOTHING])
    assert own.tolist() == pytest.approx([73.6, 83.6])
    assert cost.tolist() == pytest.approx([139.57, 450.32], abs=0.005)


def test_an_idle_empty_fleet_costs_the_prefill():
    _, own, cost = fleet_costs(
        [rank_with(), rank_with()], QUIET, 0.0, 160, 16, np.inf, [NOTHING, (5, 5, 0)]
    )
    assert own.tolist() == cost.tolist() == pytest.approx([16.0, 8.0])


def test_to_evict_costs_more_where_another_rank_has_room():
    full = rank_with(resident_blocks=100.0)
    for neighbour, times in ((rank_with(), 2.0), (full, 0.5)):
        traffic = QUIET | {"prompt_blocks": 10.0, "cached_blocks": 5.0}
        _, own, cost = fleet_costs([full, neighbour], traffic, 0.0, 160, 16, np.inf, [NOTHING] * 2)
        assert cost[0] - own[0] == pytest.approx(times * 10 * 1.6)


def test_who_does_not_fit_with_what_runs_waits_by_littles_law():
    # 100 blocks in use by four requests, of which one waits; ten more do not fit.
    crowded = rank_with(active_blocks=100.0, num_running=4.0, num_waiting=1.0)
    traffic = QUIET | {"answer_ms": 300.0, "usual_capacity": 100.0}
    _, own, cost = fleet_costs([crowded], traffic, 0.0, 160, 16, np.inf, [NOTHING])
    # Who waits, and the share of one who has to end, over who runs.
    waited = 300 * (1 + 10 / 25) / 3
    assert cost[0] - own[0] == pytest.approx(2 * waited)
    _, own, cost = fleet_costs([crowded], traffic, 0.0, 160, 16, np.inf, [(5, 5, 0)])
    waited = 300 * (1 + 5 / 25) / 3
    assert cost[0] - own[0] == pytest.approx(waited), "half of the prompt is there"


def test_nobody_waits_for_room_where_no_capacity_is_known():
    crowded = rank_with(active_blocks=100.0, num_running=4.0, capacity_blocks=0.0)
    traffic = QUIET | {"answer_ms": 300.0}
    _, own, cost = fleet_costs([crowded], traffic, 0.0, 160, 16, np.inf, [NOTHING])
    assert cost.tolist() == own.tolist()


def test_who_is_followed_avoids_ranks_where_requests_usually_wait_longer():
    newcomer = rank_with(noted_ms=costing.NEVER_MS)
    fleet = [rank_with(usual_wait_ms=9.0), rank_with(usual_wait_ms=3.0), newcomer]
    for held, num_later in ((0.0, 0), (5.0, 1.5), (8.0, 6), (9.9, 40), (10.0, 40)):
        traffic = QUIET | {"distinct_blocks": 10.0, "held_blocks": held}
        _, own, cost = fleet_costs(fleet, traffic, 0.0, 160, 16, np.inf, [NOTHING] * 3)
        later = np.array([6.0, 0.0, 3.0]) * num_later
        np.testing.assert_allclose(cost - own, later)


def test_answers_teach_how_long_they_are_and_take():
    traffic = np.zeros(costing.TRAFFIC_WIDTH)
    costing.note_answer(traffic, 32.0, 640.0)
    assert traffic[[costing.ANSWER_TOKENS, costing.ANSWER_MS]].tolist() == [32.0, 640.0]
    costing.note_answer(traffic, 82.0, 140.0)
    assert traffic[[costing.ANSWER_TOKENS, costing.ANSWER_MS]].tolist() == [33.0, 630.0]
