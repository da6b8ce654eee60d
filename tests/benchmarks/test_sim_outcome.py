"""Requests of the outcome's workloads, made ready for virtual time."""

import json

import numpy as np
import pytest

from tests.benchmarks.outcome_requests import BLOCK_SIZE
from tests.benchmarks.outcome_run import Case
from tests.benchmarks.outcome_workloads import all_workloads
from tests.benchmarks.sim_outcome import Asks, _arrivals
from tests.benchmarks.test_outcome import make_run


@pytest.fixture
def workloads(tmp_path):
    return {workload.name: workload for workload in all_workloads(tmp_path)[0]}


@pytest.mark.slow
def test_a_turn_begins_with_the_blocks_of_the_last_and_of_its_answer(workloads, tmp_path):
    asks = workloads["conversations"].make(1)
    requests = Asks("conversations", tmp_path).make(1).requests
    at, turn = next((at, ask) for at, ask in enumerate(asks) if len(ask.text) == 4)
    before = next(at for at, ask in enumerate(asks) if ask.text == turn.text[:-2])
    first, second = requests[before], requests[at]
    both = np.concatenate([first.blocks, first.answer_blocks])
    np.testing.assert_array_equal(second.blocks[: len(both)], both)
    assert second.num_tokens == len(turn.tokens)
    assert len(second.blocks) == second.num_tokens // BLOCK_SIZE > len(both)


def test_open_loops_have_the_rate_that_was_measured(workloads, tmp_path):
    fits = workloads["fits"]
    assert _arrivals(Case(fits, "c8", "text"), tmp_path).clients == 8
    assert _arrivals(Case(fits, "p80", "text"), tmp_path) is None
    runs = [make_run("kvplug", 1, workload="fits", load="p80", rate=26.5).as_json()]
    (tmp_path / "outcome-runs.json").write_text(json.dumps(runs))
    assert _arrivals(Case(fits, "p80", "text"), tmp_path).rate == 26.5
