"""Workers that come, say late what they are, restart as something else and go: at any time each
holds for the router what it stored, and nothing else."""

import itertools
import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvplug import BlockStored, EventBatch, Namespace, Rank, Router, RouterConfig
from kvplug.codec import encode
from kvplug.records import read_payloads
from tests.index.reference import engine_hash

workers = st.sampled_from(["a", "b", "c"])
sizes = st.sampled_from([2, 4])
prompts = st.lists(st.sampled_from([1, 2]), min_size=4, max_size=8).map(tuple)
PROMPTS = [(1, 1, 1, 1), (1, 2, 1, 2, 1, 2, 1, 2), (2, 2, 2, 1, 1, 1)]


class FleetMachine(RuleBasedStateMachine):
    @initialize(sizes=st.tuples(sizes, sizes, sizes))
    def start(self, sizes):
        config = RouterConfig(speculative_ttl_s=0.0)
        self.router = Router(config, clock=lambda: 0.0, random_=random.Random(0))
        self.size = dict(zip("abc", sizes, strict=True))  # of the engine, whatever was said of it
        self.model = {}
        self.held = {}
        self.in_flight = []

    @rule(worker=workers, model=st.sampled_from(["", "m", "n"]), says_size=st.booleans())
    def add(self, worker, model, says_size):
        """A worker joins, or more becomes known of it."""
        size = self.size[worker] if says_size else None
        self.router.add_worker(worker, model=model, block_size=size)
        self.held.setdefault(worker, set())
        self.model[worker] = model or self.model.get(worker, "")

    @rule(worker=workers)
    def remove(self, worker):
        self.router.remove_worker(worker)
        self.held.pop(worker, None), self.model.pop(worker, None)
        self.in_flight = [each for each in self.in_flight if each[0] != worker]

    @rule(worker=workers, size=sizes)
    def restart(self, worker, size):
        """With another block size, unless that was named."""
        self.router.clear(Rank(worker))
        if worker in self.held:
            self.held[worker] = set()
            told = self.router.fleet_index.block_size_of(worker)
            self.size[worker] = told or size

    @rule(worker=workers, tokens=prompts, as_arrays=st.booleans())
    def store(self, worker, tokens, as_arrays):
        size = self.size[worker]
        ends = range(size, len(tokens) + 1, size)
        event = BlockStored(
            block_hashes=tuple(engine_hash("e", tokens[:end]) for end in ends),
            token_ids=tokens[: len(ends) * size],
            block_size=size,
            namespace=Namespace(),
        )
        batch, rank = EventBatch(events=(event,)), Rank(worker)
        if as_arrays:
            applied = self.router.apply_records(rank, read_payloads([encode(batch)]))
        else:
            applied = self.router.apply(rank, batch)
        if worker in self.held:
            assert (applied.num_stored, dict(applied.rejected)) == (len(ends), {})
            self.held[worker] |= {tokens[:end] for end in ends}
        else:
            assert applied.num_stored == 0

    @precondition(lambda self: self.held)
    @rule(tokens=prompts)
    def route(self, tokens):
        decision = self.router.route(tokens)
        self.in_flight.append((decision.rank.worker, decision.request_id))

    @precondition(lambda self: self.in_flight)
    @rule()
    def finish(self):
        self.router.finish(self.in_flight.pop(0)[1])

    @invariant()
    def everybody_holds_what_it_stored(self):
        for worker, prompt in itertools.product(self.held, PROMPTS):
            decision = self.router.route(prompt, workers=[worker], model=self.model[worker])
            self.router.finish(decision.request_id)
            ends = range(decision.block_size, len(prompt) + 1, decision.block_size)
            there = [*(prompt[:end] in self.held[worker] for end in ends), False]
            assert decision.cached_tokens == there.index(False) * decision.block_size

    @invariant()
    def no_index_is_left_over(self):
        fleet_index = self.router.fleet_index
        for group in fleet_index.groups:
            group.index.check()
        in_use = {id(fleet_index.group_of(rank)) for rank in self.router.ranks}
        assert len(fleet_index.groups) == max(1, len(in_use))
        assert len(self.router.load) == len(self.in_flight)


TestFleetMachine = FleetMachine.TestCase
TestFleetMachine.settings = settings(stateful_step_count=25)
