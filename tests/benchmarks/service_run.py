"""One round of `make bench-service` with one router: each part gives numbers by name.

In:  a contestant, the length of the parts, a seed.   Out: what was measured, and what failed.

Parts, each at a rate where every router has a core half idle, but for the two last:

* sharing: simulated engines whose caches are too small; questions about documents, in an open loop.
* text4k, ids: prompts of 4,000 tokens that have nothing in common, to engines that answer at once.
* chunks: 48 streams of 300 chunks, 100 a second each. requests: short ones, one chunk, whole.
* many_chunks, many_requests: as much as client, engines and router can do on this machine.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from tests.benchmarks.outcome_fleet import started_fleet
from tests.benchmarks.outcome_requests import Form, Writer
from tests.benchmarks.outcome_workloads import Documents, Unshared
from tests.benchmarks.service_client import Answer, Closed, Open, post, send
from tests.benchmarks.service_routers import NUM_ENGINES, Contestant, Front, cheap_fleet, opened

CACHE_TOKENS: Final = 16_384
SHARING_RATE, PROMPT_RATE, REQUEST_RATE = 12.0, 15.0, 400.0
STREAMS, STREAM_TOKENS = 48, 300
MANY_STREAMS, MANY_STREAM_TOKENS, MANY_CLIENTS = 400, 100, 32
PROMPT_TOKENS: Final = 4000
PERCENTILES: Final = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Requests of sharing (the first fill the caches) and of long prompts; seconds of the rest."""

    num_warm_up: int = 48
    num_sharing: int = 160
    num_prompts: int = 90
    seconds: float = 4.0


@dataclass(slots=True)
class Measured:
    """Numbers by name; requests without a whole answer, with the first reason."""

    numbers: dict[str, float] = field(default_factory=dict)
    failed: int = 0
    failure: str = ""

    def percentiles(self, name: str, seconds: Sequence[float]) -> None:
        """`name` with _p50, _p90, _p99, in milliseconds."""
        for percent in PERCENTILES:
            value = float(np.percentile(seconds, percent)) if seconds else float("nan")
            self.numbers[f"{name}_p{percent}"] = 1e3 * value

    def good(self, answers: Sequence[Answer], num_chunks: int) -> list[Answer]:
        """Those with all their chunks; the others are counted."""
        good = [each for each in answers if not each.failure and each.num_chunks >= num_chunks]
        self.failed += len(answers) - len(good)
        if len(good) < len(answers) and not self.failure:
            bad = next(each for each in answers if each not in good)
            self.failure = bad.failure or f"{bad.num_chunks} chunks: {bad.received[-200:]!r}"
        return good


def measure(contestant: Contestant, lengths: Lengths, seed: int) -> Measured:
    """All parts, each fleet and router started for this round."""
    measured = Measured()
    with tempfile.TemporaryDirectory(prefix="kvplug-service-") as folder:
        logs = Path(folder)
        with (
            started_fleet(NUM_ENGINES, CACHE_TOKENS, logs) as fleet,
            opened(contestant, fleet, logs) as front,
        ):
            _greet(front)
            _sharing(front, measured, lengths, seed)
        with cheap_fleet(logs) as fleet, opened(contestant, fleet, logs) as front:
            _greet(front)
            _parts_of_cost(contestant, front, measured, lengths, seed)
    return measured


def _parts_of_cost(
    contestant: Contestant, front: Front, measured: Measured, lengths: Lengths, seed: int
) -> None:
    forms: tuple[tuple[str, Form], ...] = (("text4k", "text"), ("ids", "ids"))
    for name, form in forms:
        if form not in contestant.refuses:
            _long_prompts(front, measured, lengths, seed, name, form)
    _requests(front, measured, lengths)
    _chunks(front, measured, lengths)
    if front.processes:
        measured.numbers["memory_mb"] = front.memory_mb()


def _greet(front: Front) -> None:
    """What only first requests pay must not fall to those that count."""
    writer = Writer(0)
    bodies = [writer.completion(writer.words(8), 2).body("text") for _ in range(4 * NUM_ENGINES)]
    send(front.urls, [post(body) for body in bodies], Open(50.0))


def _sharing(front: Front, measured: Measured, lengths: Lengths, seed: int) -> None:
    first, number = lengths.num_warm_up, lengths.num_warm_up + lengths.num_sharing
    make = Documents(num_requests=number, num_documents=32, document=2000, own=40, answer=8)
    requests = [post(ask.body("text")) for ask in make(seed)]
    cpu, began = front.cpu_s(), time.perf_counter()
    send(front.urls, requests[:first], Open(SHARING_RATE, seed))
    answers = send(front.urls, requests[first:], Open(SHARING_RATE, seed))
    measured.numbers["sharing_cores"] = (front.cpu_s() - cpu) / (time.perf_counter() - began)
    good = measured.good(answers, 8)
    usages = [answer.usage() for answer in good]
    prompt, cached = (sum(column) for column in zip(*usages, strict=True))
    measured.numbers["cached_share"] = cached / prompt
    measured.percentiles("ttft", [answer.ttft_s for answer in good])


def _long_prompts(
    front: Front, measured: Measured, lengths: Lengths, seed: int, name: str, form: Form
) -> None:
    make = Unshared(num_requests=lengths.num_prompts, prompt=(PROMPT_TOKENS,) * 2, answer=1)
    requests = [post(ask.body(form)) for ask in make(1000 + seed)]
    cpu, began = front.cpu_s(), time.perf_counter()
    answers = measured.good(send(front.urls, requests, Open(PROMPT_RATE, seed)), 1)
    measured.numbers[f"{name}_cores"] = (front.cpu_s() - cpu) / (time.perf_counter() - began)
    measured.percentiles(name, [answer.ttft_s for answer in answers])


def _requests(front: Front, measured: Measured, lengths: Lengths) -> None:
    requests = _whole_requests(int(REQUEST_RATE * lengths.seconds))
    _cost(front, measured, requests, Open(REQUEST_RATE), "rps", 0, len)
    _cost(front, measured, requests, Closed(MANY_CLIENTS, lengths.seconds), "many_rps", 0, len)


def _chunks(front: Front, measured: Measured, lengths: Lengths) -> None:
    load = Closed(STREAMS, lengths.seconds)
    _cost(front, measured, _streams(STREAM_TOKENS), load, "chunks", STREAM_TOKENS, _num_chunks)
    load = Closed(MANY_STREAMS, lengths.seconds)
    number = MANY_STREAM_TOKENS
    _cost(front, measured, _streams(number), load, "many_chunks", number, _num_chunks)


def _cost(
    front: Front,
    measured: Measured,
    requests: Sequence[bytes],
    load: Open | Closed,
    name: str,
    num_chunks: int,
    amount_of: Callable[[Sequence[Answer]], int],
) -> None:
    cpu, began = front.cpu_s(), time.perf_counter()
    answers = measured.good(send(front.urls, requests, load), num_chunks)
    cpu, wall = front.cpu_s() - cpu, time.perf_counter() - began
    measured.numbers[f"{name}_per_s"] = amount_of(answers) / wall
    if front.processes:
        measured.numbers[f"{name}_cores"] = cpu / wall
        measured.numbers[f"{name}_per_cpu_s"] = amount_of(answers) / max(cpu, 1e-9)


def _num_chunks(answers: Sequence[Answer]) -> int:
    return sum(answer.num_chunks for answer in answers)


def _whole_requests(number: int) -> list[bytes]:
    writer = Writer(2)
    asks = [writer.completion(writer.words(64), 1) for _ in range(number)]
    bodies = [msgspec.json.decode(ask.body("text")) for ask in asks]
    for body in bodies:
        body["stream"] = False
        del body["stream_options"]
    return [post(msgspec.json.encode(body)) for body in bodies]


def _streams(num_tokens: int) -> list[bytes]:
    writer = Writer(3)
    asks = [writer.completion(writer.words(32), num_tokens) for _ in range(2 * MANY_STREAMS)]
    return [post(ask.body("text")) for ask in asks]
