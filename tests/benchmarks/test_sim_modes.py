"""Small forms of the rows of `make sim-modes`."""

import pytest

from kvplug.router.config import Mode
from kvplug.sim.replay.policies import make_policy
from tests.benchmarks import sim_labels
from tests.benchmarks.outcome_requests import Ask
from tests.benchmarks.sim_modes import COSTS, HOST, MODES, SCENARIOS, session_of


def test_every_mode_has_a_row():
    modes = {policy.partition("mode=")[2] or "kv" for policy in MODES}
    assert modes == set(Mode.__args__)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_every_row_is_a_policy(scenario):
    for policy in {*scenario.policies, *MODES, *COSTS, *HOST}:
        make_policy(policy, scenario.specs(), 1)


def test_a_chat_is_one_session():
    first = ({"role": "system", "content": "be kind"}, {"role": "user", "content": "who?"})
    later = (*first, {"role": "assistant", "content": "me"}, {"role": "user", "content": "why?"})
    asks = [Ask(messages, (1, 2), 1) for messages in (first, later)]
    assert {session_of(ask) for ask in asks} == {"who?"}


def test_a_document_is_one_session():
    asks = [Ask("text", (*range(64), own), 1) for own in (70, 71)]
    assert len({session_of(ask) for ask in asks}) == 1
    assert session_of(Ask("text", (1,), 1)) != session_of(asks[0])


def test_preferred_taints_shift_traffic_and_required_ones_are_never_broken():
    rows = {row["taint"]: row["share"] for row in sim_labels.taints([1], 60)[:7]}
    assert rows["preferred, -1"] < rows["preferred, 0"] < rows["preferred, 1"]
    assert rows["required"] == 1.0


def test_a_query_finds_the_aligned_copies():
    rows = {row["routing"]: row for row in sim_labels.experts([1], 60)}
    assert rows["no query"]["aligned"] < 0.5 < rows["query, boost 1"]["aligned"]
    filtered = rows["query, no fallback"]
    assert filtered["aligned"] + filtered["refused"] == pytest.approx(1.0)


def test_a_reader_of_the_pool_recovers_without_prefill():
    without, with_pool = sim_labels.pools([1, 2], 60)
    assert with_pool["recovery_ms"] < without["recovery_ms"] / 2
    assert without["recovered cached"] + 0.5 < with_pool["recovered cached"]
