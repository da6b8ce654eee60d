"""One engine beside one router: requests one by one, each asked of a router that has seen all that
the engine said before.

In:  an engine with the router that follows it.   Out: a Tally.
"""

import random
import time
from dataclasses import dataclass, field

from kvplug.audit.audit import Audit, Usage
from tests.engines.line_engine import predicted_tokens

SHORT = [5] * 5
NUM_TOKENS = 400  # vocabulary
MAX_VERDICT_S = 30.0
LENGTHS = (5, 32, 40, 96, 160, 250, 384, 700)


def prompts(seed):
    """New ones, and ones that share a prefix with, or repeat, or continue one of the last dozen."""
    rnd, recent = random.Random(seed), []
    while True:
        prompt = [rnd.randrange(3, NUM_TOKENS) for _ in range(rnd.choice(LENGTHS))]
        if recent and rnd.random() < 0.7:
            before = rnd.choice(recent)
            cut = rnd.choice([len(before), rnd.randrange(1, len(before) + 1)])
            prompt = before[:cut] + prompt[: rnd.choice([0, 1, 33, 96, 200])]
        prompt = prompt[:900]
        recent = [*recent[-11:], prompt]
        yield prompt


@dataclass
class Tally:
    """Requests, tokens that the engine reused, requests by the sign of predicted - reported and
    those that the audit calls incorrectly routed; blocks that only the engine has (missing) and
    that only the index has (phantoms), in the group or tier that has most of them, summed over all
    comparisons.
    """

    num_requests: int = 0
    num_cached: int = 0
    num_over: int = 0
    num_under: int = 0
    num_wrong: int = 0
    num_groups: int = 0
    num_missing: int = 0
    num_phantoms: int = 0
    differences: list[tuple[int, int]] = field(default_factory=list)

    def note(self, predicted, cached):
        self.num_requests += 1
        self.num_cached += cached
        self.num_over += predicted > cached
        self.num_under += predicted < cached
        if predicted != cached:
            self.differences.append((predicted, cached))

    def compare_blocks(self, followed):
        followed.engine.look()
        apart = followed.apart_by_group().values()
        self.num_groups = len(followed.engine.blocks_of)
        self.num_missing += max(missing for missing, _ in apart)
        self.num_phantoms += max(phantoms for _, phantoms in apart)


def compare(followed, num_requests, ask, seed=0):
    """Ask, with answers of one or of 40 tokens; every 20 requests compare the blocks.

    ask(rnd): what else goes with a request; with `reset` the cache is emptied before. When an
    adapter has other weights than before, the router is told.
    """
    tally, rnd, weights = Tally(), random.Random(seed), {}
    audit = Audit(followed.router)
    for number, prompt in zip(range(num_requests), prompts(seed), strict=False):
        how = ask(rnd)
        if how.pop("reset", False):
            followed.engine.ask(SHORT, reset=True)
        lora = how.get("lora", "")
        if how.get("weights") != weights.setdefault(lora, how.get("weights")):
            followed.forget_adapter(lora)
            weights[lora] = how["weights"]
        decision = followed.decide(prompt, salt=how.get("salt", ""), lora=lora)
        [cached] = followed.engine.ask(prompt, max_tokens=rnd.choice([1, 1, 1, 40]), **how)
        tally.note(predicted_tokens(decision, len(prompt)), cached)
        audit.answered(decision.request_id, Usage(len(prompt), cached))
        if number % 20 == 19 or number == num_requests - 1:
            tally.compare_blocks(followed)
    tally.num_wrong = num_wrong(audit, num_requests)
    return tally


def num_wrong(audit, num_requests):
    """How many were incorrectly routed, once all have a verdict."""
    deadline_s = time.monotonic() + MAX_VERDICT_S
    while sum(ledger.num_audited for ledger in audit.ledgers().values()) < num_requests:
        assert time.monotonic() < deadline_s, "some requests have no verdict"
        time.sleep(0.1)
    return sum(ledger.num_wrong for ledger in audit.ledgers().values())
