"""A fleet that both routers follow, in one random state after the other, and what they make of it.

In:  a profile, a seed.   Out: counts of what was equal, what was not, and for which reason.

A difference has a reason if each side does what its own rules say (tests/differential/reference.py)
and these differ here; any other raises Disagreement, which has all of the state.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, NamedTuple

from kvplug.events import BlockStored, Event, Tier
from tests.differential.active import ActiveBlocks
from tests.differential.blocks import BlockTree, Prompt
from tests.differential.engine import Engine
from tests.differential.profiles import Profile
from tests.differential.reference import Blocks
from tests.differential.sides import Asked, Dynamo, Kvplug, payload_of, request_of

STATES_OF_FLEET = 60
_BLOCK_SIZES = (1, 4, 16, 32)
_MOST_LIVE = 24
_MOST_POLLS = 100_000
_STATES_BETWEEN_SAMPLES, _SAMPLES = 15, 400
# What chi square exceeds once in a million times, with 1 to 5 degrees of freedom.
_CHI_SQUARE = (23.93, 27.63, 30.66, 33.38, 35.89)
_NUMBERS = ("states", "equal", "choices", "events", "reservations", "output_blocks", "samples")
_STATES_BETWEEN_EVENTS = 8


class Disagreement(AssertionError):
    """The two differ, and no rule says that they do."""


@dataclass(slots=True)
class Live:
    """A request in flight, and the tokens that each side has booked for its prefill. `left`: of its
    answer, if its length is expected.
    """

    worker: int
    ours: float
    theirs: float
    left: float | None
    is_prefilled: bool = False


class Booked(NamedTuple):
    """The same, of all requests on a worker."""

    ours: float
    theirs: float


@dataclass(slots=True)
class Counts:
    """Of states. `reasons`: those in which rules differ, by reason; `ties`: in which several
    workers cost the least, by how many; `first_of_two`: [kvplug, Dynamo] took the first of two.
    """

    states: int = 0
    equal: int = 0
    choices: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    ties: Counter[int] = field(default_factory=Counter)
    first_of_two: list[int] = field(default_factory=lambda: [0, 0])
    events: int = 0
    reservations: int = 0
    output_blocks: int = 0
    samples: int = 0

    def as_json(self) -> dict[str, Any]:
        """{name: number}, of reasons and ties by kind."""
        numbers = {name: getattr(self, name) for name in _NUMBERS}
        by_kind = {"reasons": dict(self.reasons), "ties": dict(self.ties)}
        return {**numbers, **by_kind, "first_of_two": self.first_of_two}

    def add(self, other: Counts) -> None:
        """Those of another fleet."""
        for name in _NUMBERS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.reasons.update(other.reasons)
        self.ties.update(other.ties)
        for side, number in enumerate(other.first_of_two):
            self.first_of_two[side] += number


def run(profile: Profile, num_states: int, first_seed: int = 0) -> Counts:
    """So many states of fleets of `STATES_OF_FLEET`."""
    counts, dynamo = Counts(), Dynamo(profile.environment)
    try:
        for at in range(0, num_states, STATES_OF_FLEET):
            fleet = Fleet(profile, dynamo, first_seed + at // STATES_OF_FLEET)
            counts.add(fleet.run(min(STATES_OF_FLEET, num_states - at)))
    finally:
        dynamo.close()
    return counts


class Fleet:
    """`run` goes through states."""

    def __init__(self, profile: Profile, dynamo: Dynamo, seed: int) -> None:
        self.profile, self.dynamo, self.counts = profile, dynamo, Counts()
        self.random = random.Random(seed)
        self.block_size = self.random.choice(_BLOCK_SIZES)
        self.num_workers = self.random.randint(2, 6)
        self.tree = BlockTree(self.random, self.block_size, self.random.randint(3, 8))
        self.taints = [self._some_taints() for _ in range(self.num_workers)]
        self.kvplug = Kvplug(self.taints, self.block_size, seed, **profile.settings)
        dynamo.start(self.taints, self.block_size)
        self.engines = [
            Engine(self.tree, self.random, profile.tiers, profile.leaves_gaps)
            for _ in range(self.num_workers)
        ]
        self.known = {
            forgets: [Blocks(forgets, self.tree.parent_of) for _ in range(self.num_workers)]
            for forgets in (False, True)
        }
        self.active = {
            keeps: [ActiveBlocks(keeps) for _ in range(self.num_workers)] for keeps in (False, True)
        }
        self.live: dict[str, Live] = {}
        self._ids = count()

    def run(self, num_states: int) -> Counts:
        """So many states, each compared."""
        for number in range(num_states):
            if number % _STATES_BETWEEN_EVENTS == 0:
                self._change_caches()
            self._change_load()
            self._compare()
        return self.counts

    def _some_taints(self) -> set[str]:
        return {taint for taint in ("fast", "near") if self.random.random() < 0.5}

    def _change_caches(self) -> None:
        markers = {}
        for worker, engine in enumerate(self.engines):
            events = [event for _ in range(self.random.randint(0, 4)) for event in engine.change()]
            if events:
                markers[worker] = {tier: self.tree.fresh() for tier in self.profile.tiers}
                mine = [self._marker(prompt, tier) for tier, prompt in markers[worker].items()]
                self._publish(worker, [*events, *mine])
        self._wait_for(markers)

    def _marker(self, prompt: Prompt, tier: Tier) -> BlockStored:
        return BlockStored(
            block_hashes=prompt.names,
            token_ids=tuple(prompt.tokens),
            block_size=self.block_size,
            tier=tier,
        )

    def _publish(self, worker: int, events: Sequence[Event]) -> None:
        payload = payload_of(events)
        self.kvplug.publish(worker, payload)
        self.dynamo.publish(worker, payload)
        self.counts.events += len(events)
        for known in self.known.values():
            for event in events:
                known[worker].apply(event)

    def _wait_for(self, markers: Mapping[int, Mapping[Tier, Prompt]]) -> None:
        """Until Dynamo knows the last event of each worker and tier: those come in their order."""
        for worker, of_tier in markers.items():
            for prompt in of_tier.values():
                self._wait_until_held(worker, prompt)

    def _wait_until_held(self, worker: int, prompt: Prompt) -> None:
        for _ in range(_MOST_POLLS):
            [answer] = self.dynamo.ask(["overlap_scores", request_of(prompt.tokens)])
            if self.dynamo.lengths(answer)[worker].disk:
                return
        raise Disagreement(f"Dynamo did not take the events of worker {worker}")

    def _change_load(self) -> None:
        for request_id, live in list(self.live.items()):
            dice = self.random.random()
            if dice < 0.08 or len(self.live) > _MOST_LIVE:
                self._finish(request_id)
            elif dice < 0.25:
                self.dynamo.ask(["prefill_complete", request_id])
                self.kvplug.router.first_token(request_id)
                live.is_prefilled = True
            elif dice < 0.5 and self.profile.has_answers:
                self._add_output_block(request_id, live)

    def _finish(self, request_id: str) -> None:
        self.dynamo.ask(["free_reservation", request_id])
        self.kvplug.router.finish(request_id)
        worker = self.live.pop(request_id).worker
        for active in self.active.values():
            active[worker].end(request_id)

    def _add_output_block(self, request_id: str, live: Live) -> None:
        """Blocks of an answer that nears its end, or of one whose length nobody expects."""
        fraction = None
        if live.left is not None:
            # In 64ths, so that sums are exact, and so is what is rounded.
            fraction = live.left = int(64 * live.left * self.random.uniform(0.5, 1)) / 64
        self.dynamo.ask(["add_output_block", request_id, fraction])
        self.kvplug.router.add_output_block(request_id, fraction)
        for active in self.active.values():
            active[live.worker].add_output(request_id, fraction)
        self.counts.output_blocks += 1

    @property
    def is_sampled(self) -> bool:
        """Whether many choices are drawn in this state."""
        is_turn = self.counts.states % _STATES_BETWEEN_SAMPLES == _STATES_BETWEEN_SAMPLES - 1
        return self.profile.temperature > 0 and is_turn

    def _asked(self) -> Asked:
        if not self.profile.asks:
            return Asked()
        dice = self.random
        allowed = sorted(dice.sample(range(self.num_workers), dice.randint(1, self.num_workers)))
        required = [taint for taint in ("fast", "near") if dice.random() < 0.15]
        fitting = [w for w in allowed if self.taints[w].issuperset(required)]
        preferred = {taint: dice.uniform(-1, 1) for taint in ("fast", "near")}
        return Asked(
            weight=dice.choice((None, None, None, 0.0, 0.25, 2.0, dice.uniform(0, 4))),
            workers=fitting or None,
            required_taints=required if fitting else (),
            preferred_taints=preferred if dice.random() < 0.5 else {},
        )

    def _compare(self) -> None:
        prompt, asked = self.tree.prompt(), self._asked()
        # Samples are drawn after the choice, which must not have changed the load.
        is_reserved = self.random.random() < 0.4 and not self.is_sampled
        request_id = f"r{next(self._ids)}" if is_reserved else None
        request = request_of(prompt.tokens, asked)
        choose = ["select", request]
        if request_id is not None:
            choose = ["select_and_reserve", {**request, "selection_id": request_id}]
        overlap, loads, choice = self.dynamo.ask(
            ["overlap_scores", request_of(prompt.tokens)],
            ["potential_loads", request_of(prompt.tokens)],
            choose,
        )
        State(self, prompt, asked).compare(overlap, loads, choice["worker_id"])
        self.counts.states += 1
        if request_id is not None:
            self._reserve(request_id, prompt, choice["worker_id"])

    def _reserve(self, request_id: str, prompt: Prompt, worker: int) -> None:
        self.kvplug.reserve(request_id, prompt.tokens, worker)
        num_tokens, ours = len(prompt.tokens), self.known[False][worker].lengths(prompt.names)
        cached = self.cached_tokens(worker, prompt)
        left = 1.0 if self.random.random() < 0.5 else None
        booked = num_tokens - self.block_size * ours.disk, num_tokens - cached
        self.live[request_id] = Live(worker, *booked, left)
        for active in self.active.values():
            active[worker].start(request_id, prompt.names)
        self.counts.reservations += 1

    def cached_tokens(self, worker: int, prompt: Prompt) -> int:
        """As Dynamo counts them, in whole tokens."""
        credit = self.known[True][worker].credit(prompt.names, *self.profile.credits)
        return _rounded(self.block_size * credit)

    def booked(self, worker: int) -> Booked:
        """Tokens that each side still counts as to be prefilled."""
        waiting = [each for each in self.live.values() if each.worker == worker]
        waiting = [each for each in waiting if not each.is_prefilled]
        return Booked(sum(each.ours for each in waiting), sum(each.theirs for each in waiting))


def _rounded(number: float) -> int:
    """Half up, as Rust rounds."""
    return math.floor(number + 0.5)


class State:
    """One prompt, as the fleet is."""

    def __init__(self, fleet: Fleet, prompt: Prompt, asked: Asked) -> None:
        self.fleet, self.prompt, self.asked = fleet, prompt, asked
        self.workers = range(fleet.num_workers)
        self.ours, self.theirs = (
            [blocks.lengths(prompt.names) for blocks in fleet.known[forgets]]
            for forgets in (False, True)
        )
        self.booked = [fleet.booked(worker) for worker in self.workers]
        self.decode, self.their_decode = (
            [active.count_with(prompt.names) for active in fleet.active[keeps]]
            for keeps in (False, True)
        )

    def compare(self, overlap: dict[str, Any], loads: list[dict[str, int]], choice: int) -> None:
        """Dynamo's answers with kvplug's."""
        fleet, tokens = self.fleet, self.prompt.tokens
        self._require("overlap of kvplug", fleet.kvplug.lengths(tokens), self.ours)
        self._require("overlap of Dynamo", fleet.dynamo.lengths(overlap), self.theirs)
        of_worker = {each["worker_id"]: each for each in loads}
        prefill = [of_worker[w]["potential_prefill_tokens"] for w in self.workers]
        decode = [of_worker[w]["potential_decode_blocks"] for w in self.workers]
        self._require("potential prefill tokens of Dynamo", prefill, self._expected_theirs())
        self._require("potential decode blocks of Dynamo", decode, self.their_decode)
        if fleet.profile.is_plain:
            self._compare_loads()
        chosen, costs = fleet.kvplug.costs(tokens, self.asked)
        reasons = self._reasons()
        fleet.counts.reasons.update(reasons)
        if reasons:
            return
        fleet.counts.equal += 1
        if fleet.profile.is_plain:
            self._compare_costs(costs, prefill, decode)
        if fleet.is_sampled:
            self._compare_samples(list(costs.values()))
        elif self.asked.weight is None and not fleet.profile.temperature:
            self._compare_choice(costs, chosen, choice)

    def _reasons(self) -> set[str]:
        """Why the two differ here, by their rules."""
        known, path = self.fleet.known, self.prompt.names
        ours, theirs = (
            [blocks.credit(path, *self.fleet.profile.credits) for blocks in known[forgets]]
            for forgets in (False, True)
        )
        devices = [
            (mine.device, other.device) for mine, other in zip(self.ours, self.theirs, strict=True)
        ]
        reasons = set()
        if any(mine != other for mine, other in devices):
            reasons.add("gap")
        elif self.ours != self.theirs or not all(map(math.isclose, ours, theirs)):
            reasons.add("order")
        if any(booked.ours != booked.theirs for booked in self.booked):
            reasons.add("loaded")
        if self.decode != self.their_decode:
            reasons.add("stale")
        return reasons

    def _expected_theirs(self) -> list[float]:
        fleet, num_tokens = self.fleet, len(self.prompt.tokens)
        return [
            booked.theirs + num_tokens - fleet.cached_tokens(worker, self.prompt)
            for worker, booked in enumerate(self.booked)
        ]

    def _expected_ours(self) -> list[float]:
        fleet, num_tokens = self.fleet, len(self.prompt.tokens)
        expected = []
        for blocks, booked in zip(fleet.known[False], self.booked, strict=True):
            credit = blocks.credit(self.prompt.names, *fleet.profile.credits)
            expected.append(booked.ours + num_tokens - fleet.block_size * credit)
        return expected

    def _compare_loads(self) -> None:
        """kvplug's loads are what its rules say; so are the two terms of its cost."""
        kvplug, tokens, size = self.fleet.kvplug, self.prompt.tokens, self.fleet.block_size
        mine, whole = (kvplug.costs(tokens, Asked(weight=weight))[1] for weight in (0.0, 1.0))
        self._require("cost of decoding", list(mine.values()), self.decode)
        self._require("potential loads", kvplug.potential_loads(tokens), self._own_loads())
        prefill = [size * (whole[w] - mine[w]) for w in self.workers]
        self._require_close("cost of prefill, in tokens", prefill, self._expected_ours())

    def _own_loads(self) -> list[tuple[int, int]]:
        size, num_tokens = self.fleet.block_size, len(self.prompt.tokens)
        return [
            (round(booked.ours + num_tokens - size * lengths.disk), num_blocks)
            for booked, lengths, num_blocks in zip(self.booked, self.ours, self.decode, strict=True)
        ]

    def _compare_costs(
        self, costs: dict[int, float], prefill: list[int], decode: list[int]
    ) -> None:
        """kvplug's are what Dynamo's own loads make, but for what Dynamo rounds."""
        weight = self.asked.weight
        weight = self.fleet.profile.weight if weight is None else weight
        most = 0.5 * weight / self.fleet.block_size if self.fleet.profile.has_tiers else 0.0
        factors = [self._factor(w) for w in self.workers]
        expected = {
            w: factors[w] * (weight * prefill[w] / self.fleet.block_size + decode[w]) for w in costs
        }
        if not all(abs(costs[w] - expected[w]) <= factors[w] * most + 1e-6 for w in costs):
            self._fail(f"costs: {costs}, Dynamo's loads make {expected}")

    def _factor(self, worker: int) -> float:
        matching = [
            self.asked.preferred_taints.get(each, 0.0) for each in self.fleet.taints[worker]
        ]
        return math.exp(-math.tanh(sum(matching)))

    def _compare_choice(self, costs: dict[int, float], ours: int, choice: int) -> None:
        """Dynamo's choice, and kvplug's, are among the cheapest by kvplug's costs."""
        least = min(costs.values())
        cheapest = [w for w, cost in costs.items() if cost <= least + 1e-9 * max(1.0, abs(least))]
        counts = self.fleet.counts
        if ours not in cheapest or choice not in cheapest:
            self._fail(f"choice: Dynamo {choice}, kvplug {ours}, cheapest {cheapest}, {costs}")
        counts.choices += 1
        if len(cheapest) > 1:
            counts.ties[len(cheapest)] += 1
        if len(cheapest) == 2:
            for side, chosen in enumerate((ours, choice)):
                counts.first_of_two[side] += chosen == cheapest[0]

    def _compare_samples(self, costs: list[float]) -> None:
        """Both draw workers as often as a softmax over rescaled costs says."""
        span, temperature = max(costs) - min(costs), self.fleet.profile.temperature
        scaled = [(cost - min(costs)) / span if span else 0.0 for cost in costs]
        weights = [math.exp(-each / temperature) for each in scaled]
        calls = [["select", request_of(self.prompt.tokens, self.asked)]] * _SAMPLES
        drawn = {
            "Dynamo": [answer["worker_id"] for answer in self.fleet.dynamo.ask(*calls)],
            "kvplug": [
                self.fleet.kvplug.costs(self.prompt.tokens, self.asked)[0] for _ in range(_SAMPLES)
            ],
        }
        for side, workers in drawn.items():
            found = [workers.count(w) for w in self.workers]
            expected = [_SAMPLES * each / sum(weights) for each in weights]
            distance = sum((n - e) ** 2 / e for n, e in zip(found, expected, strict=True))
            if distance > _CHI_SQUARE[self.fleet.num_workers - 2]:
                self._fail(f"{side} drew {found}, a softmax over {costs} expects {expected}")
        self.fleet.counts.samples += 2 * _SAMPLES

    def _require(self, what: str, found: object, expected: object) -> None:
        if found != expected:
            self._fail(f"{what}: {found}, expected {expected}")

    def _require_close(self, what: str, found: list[float], expected: list[float]) -> None:
        if not all(map(partial(math.isclose, abs_tol=1e-6), found, expected)):
            self._fail(f"{what}: {found}, expected {expected}")

    def _fail(self, text: str) -> None:
        fleet = self.fleet
        raise Disagreement(
            f"{fleet.profile.name}, state {fleet.counts.states}: {text}; block size "
            f"{fleet.block_size}, {len(self.prompt.tokens)} tokens, {self.asked}, "
            f"{len(fleet.live)} live requests, prefixes {self.ours} and {self.theirs}"
        )
