import threading

import numpy as np
import pytest

from kvplug.kernels import handover
from kvplug.kernels._jit import COMPILED
from kvplug.kernels.handover import AWAITED, FREE, HANDED

LOOKS = 10**9
TIMEOUT_S = 30.0


def word_of(state):
    return np.array([state], dtype=np.uint64)


@pytest.mark.parametrize("state", [FREE, AWAITED, HANDED])
def test_nobody_comes_and_nothing_stays_behind(state):
    word, waiting = word_of(state), np.zeros(1, dtype=np.uint8)
    assert not handover.await_lock(word, waiting, 3)
    assert (word[0], waiting[0]) == (state, 1)


@pytest.mark.parametrize(
    ("before", "was_handed", "after"),
    [(FREE, False, FREE), (AWAITED, True, HANDED), (HANDED, False, HANDED)],
)
def test_only_who_waits_is_given_the_lock(before, was_handed, after):
    word = word_of(before)
    assert handover.hand_over(word, 3) == was_handed
    assert word[0] == after


@pytest.mark.skipif(not COMPILED, reason="plain Python keeps the GIL while it waits")
@pytest.mark.slow
def test_two_threads_hand_over_again_and_again():
    word, log, num_rounds = word_of(FREE), [], 200
    waiting = np.zeros(1, dtype=np.uint8)

    def give():
        for number in range(num_rounds):
            while not handover.hand_over(word, LOOKS):
                pass
            log.append(("given back", number))

    giver = threading.Thread(target=give)
    giver.start()
    for number in range(num_rounds):
        assert handover.await_lock(word, waiting, LOOKS)
        log.append(("taken", number))
        word[0] = FREE
    giver.join(TIMEOUT_S)
    taken = [entry for entry in log if entry[0] == "taken"]
    assert taken == [("taken", number) for number in range(num_rounds)]
    assert len(log) == 2 * num_rounds
