"""The soak of a bounded router, in its short form; `make soak-bounded` looks at memory, too."""

import numpy as np
import pytest
from rich.console import Console

from kvplug.records import read_payloads
from tests.benchmarks.soak_bounded import Sample, Soak, failures, payload_of, run


@pytest.mark.slow
def test_the_bound_is_kept_and_every_prompt_stored():
    soak = Soak(max_bytes=2**20, seed=0)
    samples = run(soak, 1.0, Console(quiet=True))
    assert soak.num_stored > 2**20 // 40
    assert max(sample.index_bytes for sample in samples) <= 2**20


def test_a_payload_is_what_an_engine_sends():
    hashes, tokens = np.array([7, 2**63], dtype=np.uint64), np.arange(32, dtype=np.uint32)
    event = read_payloads([payload_of(hashes, tokens)]).event(0)
    assert event.block_hashes == (7, 2**63)
    assert (event.token_ids, event.block_size) == (tuple(range(32)), 16)


def test_what_grows_is_named():
    steady = [Sample(float(second), 1, 100, 110) for second in range(20)]
    assert failures(steady, 100) == []
    grown = [*steady, Sample(20.0, 1, 101, 140)]
    assert failures(grown, 100) == [
        "the index took 101 of 100 bytes",
        "the process grew by 1.39 times what the index says",
        "the process went on growing, from 110 to 140 bytes",
    ]
