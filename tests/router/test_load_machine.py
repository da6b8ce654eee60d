"""The load of a fleet under any order of calls, compared with a plain account of it."""

import math
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvplug import BlockStored, EventBatch, Rank, Router, RouterConfig
from kvplug.errors import NoWorkerError, UnknownRequestError
from kvplug.hashing import BlockHasher, as_tokens
from kvplug.kernels import costing

WORKERS = ("a", "b", "c")
EXPIRY_S = 100.0
SECONDS = 0.001
COLUMNS = [costing.NUM_RUNNING, costing.NUM_WAITING, costing.CONTEXT_TOKENS, costing.ACTIVE_BLOCKS]
ZERO_WHEN_IDLE = [*COLUMNS, costing.WAITING_MS, costing.PREFILL_TOKENS, costing.COMING_BLOCKS]

workers = st.sampled_from(WORKERS)
prompts = st.lists(st.integers(1, 2), min_size=1, max_size=6)
ids = st.sampled_from([f"r{number}" for number in range(6)])
fractions = st.none() | st.floats(0, 1)


class Clock:
    now_s = 1000.0

    def __call__(self):
        return self.now_s


@dataclass
class Live:
    """A request in flight, as the account has it."""

    worker: str
    tokens: list[int]
    deadline_s: float
    is_prefilled: bool = False
    has_first_token: bool = False
    num_outputs: int = 0
    weight: float = 0.0
    fraction: float = 1.0
    decayed: float = 0.0
    blocks: list[tuple[int, ...]] = field(default_factory=list)

    def __post_init__(self):
        self.blocks = [tuple(self.tokens[: end + 1]) for end in range(len(self.tokens))]


class LoadMachine(RuleBasedStateMachine):
    """A first token is always reported: what is presumed has tests of its own."""

    def __init__(self):
        super().__init__()
        self.clock, self.live, self.members = Clock(), {}, set(WORKERS)
        config = RouterConfig(block_size=1, request_expiry_s=EXPIRY_S)
        self.router = Router(config, clock=self.clock)
        for worker in WORKERS:
            self.router.add_worker(worker)

    def tick(self, seconds=SECONDS):
        self.clock.now_s += seconds

    def expire(self):
        now_s = self.clock.now_s
        self.live = {i: each for i, each in self.live.items() if each.deadline_s > now_s}

    def start(self, request_id, worker, tokens):
        self.live[request_id] = Live(worker, tokens, self.clock.now_s + EXPIRY_S)

    def own_blocks(self, request):
        on = Counter(
            block for each in self.live.values() if each.worker == request.worker
            for block in each.blocks
        )  # fmt: skip
        alone = [on[block] == 1 for block in reversed(request.blocks)]
        return [*alone, False].index(False)

    @rule(request_id=ids, worker=workers, tokens=prompts)
    def route(self, request_id, worker, tokens):
        self.tick()
        self.expire()
        if request_id not in self.live and worker in self.members:
            self.router.route(tokens, request_id=request_id, workers=[worker])
            self.start(request_id, worker, tokens)

    @rule(request_id=ids, worker=workers, tokens=prompts, prefill=st.none() | st.integers(0, 6))
    def adopt(self, request_id, worker, tokens, prefill):
        self.tick()
        self.expire()
        if request_id not in self.live and worker in self.members:
            hashes = BlockHasher(1).sequence_hashes(as_tokens(tokens))
            prefill = None if prefill is None else min(prefill, len(tokens))
            self.router.adopt(request_id, Rank(worker), hashes, len(tokens), prefill)
            self.start(request_id, worker, tokens)

    @rule(request_id=ids)
    def first_token(self, request_id):
        request = self.live.get(request_id)
        has_effect = request is not None and not request.has_first_token
        assert self.router.first_token(request_id) is has_effect
        if has_effect:
            request.is_prefilled = request.has_first_token = True

    @rule(request_id=ids, fraction=fractions)
    def add_output_block(self, request_id, fraction):
        request = self.live.get(request_id)
        assert self.router.add_output_block(request_id, fraction) is (request is not None)
        if request is not None:
            request.num_outputs += 1
            request.weight += 1.0
            if fraction is not None:
                request.weight = fraction * request.num_outputs
                request.fraction = fraction
                request.decayed = (1.0 - fraction) * self.own_blocks(request)

    @rule(request_id=ids, worker=workers)
    def moved(self, request_id, worker):
        if worker not in self.members:
            return
        self.expire()
        request = self.live.get(request_id)
        assert self.router.moved(request_id, Rank(worker)) is (request is not None)
        if request is not None and request.worker != worker:
            request.worker, request.is_prefilled, request.has_first_token = worker, False, False
            request.deadline_s = self.clock.now_s + EXPIRY_S
            request.decayed = (1.0 - request.fraction) * self.own_blocks(request)

    @rule(request_id=ids, generated=prompts, exclude=st.sets(workers))
    def migrate(self, request_id, generated, exclude):
        self.tick()
        self.expire()
        request = self.live.get(request_id)
        tokens = generated if request is None else request.tokens + generated
        others = self.members - exclude - {None if request is None else request.worker}
        if request is None or not others:
            error = UnknownRequestError if request is None else NoWorkerError
            with pytest.raises(error):
                self.router.migrate(request_id, tokens, exclude=exclude)
            return
        migration = self.router.migrate(request_id, tokens, exclude=exclude)
        assert migration.failed == Rank(request.worker)
        assert migration.decision.rank.worker in others
        self.start(request_id, migration.decision.rank.worker, tokens)

    @rule(request_id=ids)
    def renew(self, request_id):
        request = self.live.get(request_id)
        assert self.router.renew(request_id) is (request is not None)
        if request is not None:
            request.deadline_s = self.clock.now_s + EXPIRY_S

    @rule(request_id=ids, num_tokens=st.none() | st.integers(0, 9))
    def finish(self, request_id, num_tokens):
        was_live = self.live.pop(request_id, None) is not None
        assert self.router.finish(request_id, num_tokens) is was_live
        assert self.router.finish(request_id) is False

    @rule(seconds=st.sampled_from([1.0, 60.0, EXPIRY_S]))
    def wait(self, seconds):
        self.tick(seconds)
        if self.members:
            self.router.peek([1])
            self.expire()

    @rule(worker=workers, tokens=prompts)
    def store(self, worker, tokens):
        names = tuple(int("".join(map(str, tokens[: end + 1]))) for end in range(len(tokens)))
        event = BlockStored(block_hashes=names, token_ids=tuple(tokens), block_size=1)
        self.router.apply(Rank(worker), EventBatch(events=(event,)))

    @precondition(lambda self: len(self.members) > 1)
    @rule(worker=workers)
    def remove_worker(self, worker):
        self.router.remove_worker(worker)
        self.members.discard(worker)
        self.live = {i: each for i, each in self.live.items() if each.worker != worker}

    @rule(worker=workers)
    def add_worker(self, worker):
        self.router.add_worker(worker)
        self.members.add(worker)

    @invariant()
    def load_is_as_accounted(self):
        assert len(self.router.load) == len(self.live)
        for worker in self.members:
            number = self.router.fleet_index.numbers.number_of(Rank(worker))
            mine = [each for each in self.live.values() if each.worker == worker]
            outputs = sum(each.weight - each.decayed for each in mine if each.num_outputs)
            expected = [
                len(mine),
                sum(not each.is_prefilled for each in mine),
                sum(len(each.tokens) for each in mine),
                len({block for each in mine for block in each.blocks}),
            ]
            seen = self.router.load.ranks[number, COLUMNS].tolist()
            assert seen[:3] == expected[:3]
            # Sums in another order may round to the next block.
            assert abs(seen[3] - expected[3] - outputs) <= 0.5 + 1e-9
            assert seen[3] == math.floor(seen[3])
            if not mine:
                idle = self.router.load.ranks[number, ZERO_WHEN_IDLE].tolist()
                assert idle == [0.0] * len(ZERO_WHEN_IDLE)
        assert len(self.router.load.active) == sum(
            len({block for each in self.live.values() if each.worker == worker
                 for block in each.blocks})
            for worker in self.members
        )  # fmt: skip

    def teardown(self):
        for request_id in list(self.live):
            self.finish(request_id, None)
        self.load_is_as_accounted()
        assert not self.router.load.ranks[:, ZERO_WHEN_IDLE].any()
        for group in self.router.fleet_index.groups:
            group.index.check()


TestLoad = LoadMachine.TestCase
TestLoad.settings = settings(stateful_step_count=30)
