from collections import OrderedDict

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvplug.kernels.forecast import CHUNK
from kvplug.router.cache_forecast import CacheForecast

NUM_RANKS = 3


class ReferenceForecast:
    """Chunks in order of use, as an OrderedDict from (first block of the chunk) to blocks."""

    def __init__(self):
        self.chunks, self.number = OrderedDict(), 0

    def use(self, prompt, num_new, capacity):
        known = 0
        for first in reversed(range(0, len(prompt), CHUNK)):
            size, before = min(CHUNK, len(prompt) - first), self.chunks.get(prompt[first], 0)
            self.chunks[prompt[first]] = max(size, before)
            self.chunks.move_to_end(prompt[first])
            known += max(0, size - before)
        if num_new > known:
            self.number += 1
            self.chunks["nobody's", self.number] = num_new - known
        while sum(self.chunks.values()) > capacity:
            self.chunks.popitem(last=False)

    def num_held(self, prompt):
        for first in range(0, len(prompt), CHUNK):
            there = self.chunks.get(prompt[first], 0)
            if there < CHUNK:
                return min(len(prompt), first + there)
        return len(prompt)


def prompt_of(document, num_blocks, question):
    """Blocks of a document, then some of a question."""
    return [10_000 * (document + 1) + i for i in range(num_blocks)] + [
        10_000_000 * (question + 1) + i for i in range(question % 5)
    ]


prompts = st.builds(prompt_of, st.integers(0, 3), st.integers(0, 70), st.integers(0, 9))
steps = st.lists(
    st.tuples(st.integers(0, NUM_RANKS - 1), prompts, st.integers(0, 90), st.integers(0, 200)),
    max_size=30,
)


@given(steps, prompts, st.integers(0, NUM_RANKS - 1))
def test_a_cache_holds_what_was_used_last(steps, asked, forgotten):
    forecast, references = CacheForecast(), [ReferenceForecast() for _ in range(NUM_RANKS)]
    asked = np.array(asked, dtype=np.uint64)
    for rank, prompt, num_new, capacity in steps:
        forecast.use(rank, np.array(prompt, dtype=np.uint64), num_new, capacity)
        references[rank].use(prompt, num_new, capacity)
        for number, reference in enumerate(references):
            assert forecast.num_held(number, asked) == reference.num_held(asked.tolist())
    forecast.forget(forgotten)
    assert forecast.num_held(forgotten, asked) == 0
    forecast.check()


def test_nodes_of_evicted_chunks_are_used_again():
    forecast = CacheForecast()
    for number in range(2000):
        prompt = np.arange(1, 65, dtype=np.uint64) + np.uint64(1000 * number)
        forecast.use(0, prompt, 80, 400)
    assert forecast.num_held(0, prompt) == 64
    assert len(forecast.arrays[1]) <= 256
    forecast.check()
