"""CXL states and experts from a KV connector of real vLLM to a router, step by step.

Two vLLM share a pool (examples/cxl_connector.py). What a block's state is, who holds it and who can
read it is compared after each step, and what a router expects with what the engines reuse.
"""

import random
from concurrent.futures import ThreadPoolExecutor

from examples.launch.engine_env import ensure_tiny_model, ensure_vllm
from kvplug import BlockCopies, CxlMetadata, CxlState, MoeLabel, Rank, Router, RouterConfig, Tier
from kvplug.index.cxl import CxlBlocks
from kvplug.index.moe_labels import MoeLabels
from tests.engines.engine_pool import Recipe, uses
from tests.engines.line_engine import Followed, LineEngine
from tests.plugins.stock_client import wait_until

BLOCK_SIZE, POOL, ROOM = 32, 3, 9
EXPERT = MoeLabel(layer=1, expert=2)
LONG = {"max_tokens": 100, "extra_args": {"kv_transfer_params": {"moe": [1, 2]}}}


def in_pool(name, folder, *, workers=None, env=()):
    """A vLLM whose blocks move to the pool; `workers`: who can read there what it puts there."""
    python = ensure_vllm()
    extra = {"folder": str(folder), "pool_id": POOL, "num_blocks": ROOM, "workers": workers}
    connector = {
        "kv_connector": "CxlConnector",
        "kv_connector_module_path": "examples.cxl_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    return LineEngine(
        name,
        python,
        ensure_tiny_model(python),
        wire="kvplug",
        env={"KVPLUG_CXL_POOLS": str(POOL), **dict(env)},
        block_size=BLOCK_SIZE,
        kv_transfer_config=connector,
        dtype="float16",  # for the reason that examples/launch/vllm_server.py names
    )


def shared(folder):
    return folder.parent / "pool"


WRITER = Recipe("writer", lambda folder: in_pool("writer", shared(folder)))
READER = Recipe("reader", lambda folder: in_pool("reader", shared(folder), workers=["only-me"]))
A, B, C = map(Rank, ("writer", "reader", "third"))


def tokens(seed, count):
    rnd = random.Random(seed)
    return [rnd.randrange(10, 4000) for _ in range(count)]


class View:
    """What a router knows of the first blocks of a prompt."""

    def __init__(self, router, prompt, num_blocks):
        self._router, self._prompt = router, prompt[: num_blocks * BLOCK_SIZE]
        hasher = router.index.hasher
        self.hashes = hasher.sequence_hashes(self._prompt).tolist()

    def states(self, rank):
        cxl = self._router.index.annotation(CxlBlocks)
        return [cxl.metadata(rank, each) for each in self.hashes]

    def overlap(self, rank):
        return self._router.index.overlap(self.hashes).of(rank)

    def copies(self, rank):
        return [each.get(rank) for each in self._router.holders_of(self._prompt)]

    def labels(self, rank):
        labels = self._router.index.annotation(MoeLabels)
        return [labels.label(rank, each) for each in self.hashes]

    def everything(self):
        ranks = (A, B, C)
        return [
            (self.states(rank), self.copies(rank), self.labels(rank), self.overlap(rank))
            for rank in ranks
        ]


def fleet(listener, *engines):
    router = Router(RouterConfig(block_size=BLOCK_SIZE, speculative_ttl_s=0.0))
    for rank in (A, B, C):
        router.add_worker(rank.worker)
    followed = [Followed(engine, router, listener) for engine in engines]
    wait_until(lambda: all(each.follower.about for each in followed), "all have said hello")
    return router, followed


def ask_again(listener, followed):
    """Be told the resident set again; not sooner than a second after the last time."""
    sequencer = followed.follower.sequencer
    num_before, done_before = sequencer.num_replays, sequencer.last_repair_s

    def is_told():
        if sequencer.num_replays == num_before:
            listener.call(sequencer.start_over)
        return sequencer.last_repair_s is not done_before and sequencer.request is None

    wait_until(is_told, "it is told again")
    followed.settle()


ON_DEVICE = BlockCopies(tiers=(Tier.DEVICE,))
IN_TRANSIT, POOLED, EVICTED = (
    CxlMetadata(state, POOL)
    for state in (CxlState.IN_TRANSIT, CxlState.CXL_POOLED, CxlState.EVICTED)
)
SHORT = tokens(2, 5)  # a step in which nothing is stored


class Case:
    """Two engines, and what a router knows of the first four blocks of a prompt."""

    def __init__(self, engines, listener):
        self.engines, self.listener = engines, listener
        self.writer, self.reader = engines
        self.router, [self.a, self.b] = fleet(listener, *engines)
        self.prompt = tokens(1, 130)
        self.view = View(self.router, self.prompt, 4)


@uses(WRITER, READER)
def test_blocks_move_to_a_pool_and_out_of_it(engines, listener):
    case = Case(engines, listener)
    assert case.a.follower.about.cxl_pools == (POOL,)
    check_a_running_request_keeps_its_blocks(case)
    check_blocks_of_a_finished_request_are_on_their_way(case)
    check_the_pool_has_them_for_all_that_read_it(case)
    check_both_engines_take_them_out_of_the_pool(case)
    check_where_an_evicted_block_was_is_kept(case)
    check_a_resident_set_says_the_same(case)
    case.router.index.check()
    assert not case.a.follower.skipped
    assert not case.b.follower.skipped


def check_a_running_request_keeps_its_blocks(case):
    view = case.view
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(case.writer.ask, case.prompt, **LONG)
        wait_until(lambda: view.overlap(A).device == 4, "the prompt is stored")
        assert view.states(A) == [None] * 4
        assert view.copies(A) == [ON_DEVICE] * 4
        assert answer.result() == [0]


def check_blocks_of_a_finished_request_are_on_their_way(case):
    view = case.view
    case.a.settle()
    assert view.labels(A) == [EXPERT] * 4
    assert view.states(A) == [IN_TRANSIT] * 4
    assert view.copies(A) == [ON_DEVICE] * 4
    assert view.overlap(B).cxl_accessible == 0


def check_the_pool_has_them_for_all_that_read_it(case):
    """The pool is what in_transit said; who can read it, their hellos say."""
    view = case.view
    case.writer.ask(SHORT)
    case.a.settle()
    assert view.states(A) == [POOLED] * 4
    assert view.copies(A) == [BlockCopies(pools=((B.worker, A.worker),))] * 4
    assert view.labels(A) == [EXPERT] * 4
    readable = [view.overlap(rank).cxl_accessible for rank in (A, B, C)]
    assert (readable, view.overlap(A).device) == ([4, 4, 0], 0)
    assert case.a.apart()[0] == 0
    case.router.set_cxl_pools(C.worker, [POOL])
    assert view.overlap(C).cxl_accessible == 4
    case.router.set_cxl_pools(C.worker, [])
    assert view.overlap(C).cxl_accessible == 0


def check_both_engines_take_them_out_of_the_pool(case):
    """As many tokens as the router says. What is stored stays in the pool besides."""
    view = case.view
    for followed in (case.b, case.a):
        assert followed.check_prediction(case.prompt) == 128
        followed.settle()
    assert view.overlap(B).device == view.overlap(A).device == 4
    assert view.states(B) == [None] * 4
    assert view.states(A) == [POOLED] * 4
    assert all(each.tiers and each.pools for each in view.copies(A))


def check_where_an_evicted_block_was_is_kept(case):
    """The ends of prompts go first."""
    view = case.view
    case.writer.ask(tokens(3, 7 * BLOCK_SIZE + 1))
    case.writer.ask(SHORT)
    case.a.settle()
    assert view.states(A) == [POOLED, POOLED, EVICTED, EVICTED]
    assert [bool(each.pools) for each in view.copies(A)] == [True, True, False, False]
    assert [each.tiers for each in view.copies(A)] == [(Tier.DEVICE,)] * 4
    assert case.a.apart()[0] == 0


def check_a_resident_set_says_the_same(case):
    """To a newcomer, and to one that asks again."""
    before = case.view.everything()
    newcomer, followed = fleet(case.listener, *case.engines)
    for each in followed:
        wait_until(lambda each=each: each.follower.trust.reason is None, "it is told everything")
        each.settle()
    assert View(newcomer, case.prompt, 4).everything() == before
    ask_again(case.listener, case.a)
    assert case.view.everything() == before


@uses(READER)
def test_workers_that_an_engine_names_are_the_only_other_readers(engine, listener):
    router, [b] = fleet(listener, engine)
    router.add_worker("only-me")
    router.set_cxl_pools(A.worker, [POOL])
    prompt = tokens(4, 70)
    view = View(router, prompt, 2)
    engine.ask(prompt)
    engine.ask(tokens(5, 5))
    b.settle()
    assert view.states(B) == [CxlMetadata(CxlState.CXL_POOLED, POOL, ("only-me",))] * 2
    readable = [view.overlap(rank).cxl_accessible for rank in (A, B, Rank("only-me"))]
    assert readable == [0, 2, 2]
