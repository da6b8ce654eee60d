"""What the sampler calls wrong, and for how long."""

import time

from tests.chaos_cluster.sampling import Sampler


class Engine:
    name, url = "e", "http://e"

    def __init__(self):
        self.blocks = {1, 2}

    def held(self):
        return set(self.blocks)


class Replica:
    name, num_starts = "r", 1

    def __init__(self):
        self.said = {"level": "exact", "reason": None, "fix": None, "blocks": [1, 2]}

    def look(self):
        return None if self.said is None else {"http://e": dict(self.said)}


def sampled(engine, replica):
    return Sampler(lambda: [engine], [replica])


def test_a_wrong_block_counts_from_the_sample_before():
    engine, replica = Engine(), Replica()
    with sampled(engine, replica) as sampler:
        sampler.next_samples()
        assert sampler.seen["r", "e"].is_right
        began_s = time.monotonic()
        engine.blocks.add(3)
        sampler.next_samples(4)
        took_s = time.monotonic() - began_s
        assert 0.2 < sampler.longest.seconds < took_s + 0.5
        assert sampler.seen["r", "e"].only_in_engine == 1
        longest = sampler.longest
        replica.said["blocks"].append(3)
        sampler.next_samples(3)
        assert sampler.longest.seconds <= longest.seconds + 0.2


def test_what_is_stale_or_not_here_is_not_wrong():
    engine, replica = Engine(), Replica()
    engine.blocks.add(3)
    replica.said["level"] = "stale"
    with sampled(engine, replica) as sampler:
        sampler.next_samples(3)
        assert sampler.seen["r", "e"].num_apart == 1
        replica.said = None
        sampler.next_samples(3)
        assert not sampler.seen
        assert sampler.longest.seconds == 0.0


def test_a_new_process_was_not_wrong_before():
    engine, replica = Engine(), Replica()
    engine.blocks.add(3)
    with sampled(engine, replica) as sampler:
        sampler.next_samples(4)
        longest_s = sampler.longest.seconds
        sampler.begin_anew()
        replica.num_starts = 2
        sampler.next_samples(2)
        assert sampler.longest.seconds < longest_s
