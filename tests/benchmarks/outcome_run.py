"""One run of `make bench-outcome`: a fleet, a router, a load; what came of it in numbers.

In:  a workload's requests, a router, a load.   Out: a Run, which goes into the file as it is.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from examples.demo.report import percentile
from tests.benchmarks.outcome_client import Answer, Closed, Open, Sent, send
from tests.benchmarks.outcome_fleet import cpu_s, started_fleet
from tests.benchmarks.outcome_requests import Ask, Form, Writer
from tests.benchmarks.outcome_routers import Router, running
from tests.benchmarks.outcome_workloads import Workload


@dataclass(frozen=True, slots=True)
class Run:
    """`load` is c2 for a closed loop of 2, p80 for an open one at 80 %. Of the requests that count:
    answers a second, ms to the first token and to the end, share of prompt tokens that were cached.
    `cores` are busy ones, by part; `late_ms` is how late the client sent, the mean.
    """

    workload: str
    load: str
    form: Form
    router: str
    seed: int
    rate: float
    rps: float
    ttft_mean: float
    ttft_p90: float
    total_mean: float
    cached: float
    failed: int
    failure: str
    digest: str
    wall_s: float
    late_ms: float
    cores: dict[str, float]

    def as_json(self) -> dict[str, Any]:
        """All fields."""
        return asdict(self)


def case_name(workload: str, form: Form, load: str) -> str:
    """What the metrics of a case begin with."""
    return f"{workload}{'_ids' if form == 'ids' else ''}_{load}"


@dataclass(frozen=True, slots=True)
class Case:
    """What a run is about, the router aside."""

    workload: Workload
    load: str
    form: Form
    seed: int = 0
    rate: float = 0.0

    @property
    def name(self) -> str:
        """What its metrics begin with."""
        return case_name(self.workload.name, self.form, self.load)

    @property
    def loop(self) -> Closed | Open:
        """The load itself; the arrivals of an open loop depend on the seed alone."""
        if self.load.startswith("c"):
            return Closed(int(self.load[1:]))
        workload = self.workload
        return Open(self.rate, self.seed, workload.num_warm_up, max(workload.clients))


def run(case: Case, asks: Sequence[Ask], router: Router) -> Run:
    """From empty caches."""
    workload = case.workload
    with (
        tempfile.TemporaryDirectory(prefix="kvplug-outcome-") as folder,
        started_fleet(workload.num_engines, workload.cache_tokens, Path(folder)) as fleet,
        running(router, fleet, Path(folder)) as front,
    ):
        num_engines = len(fleet.engines)
        send(front.url, _greetings(2 * num_engines), case.form, Closed(num_engines))
        parts = {"engines": [e.process for e in fleet.engines], "router": [front.process]}
        before = {name: cpu_s(processes) for name, processes in parts.items()}
        sent = send(front.url, asks, case.form, case.loop)
        cores = {name: cpu_s(parts[name]) - before[name] for name in parts}
    _require_equal_prompts(asks, sent)
    cores["client"] = sent.cpu_s
    return _run_of(case, router, sent, {part: s / sent.wall_s for part, s in cores.items()})


def _greetings(number: int) -> list[Ask]:
    """What only first requests pay must not fall to those that count; too short for a block."""
    writer = Writer(0)
    return [writer.completion(writer.words(8), 2) for _ in range(number)]


def _require_equal_prompts(asks: Sequence[Ask], sent: Sent) -> None:
    """Text must become the tokens that it is made for, or sharing is not what it should be."""
    for ask, answer in zip(asks, sent.answers, strict=True):
        if not answer.failure and answer.prompt_tokens != len(ask.tokens):
            raise ValueError(
                f"a prompt should have {len(ask.tokens)} tokens, an engine saw "
                f"{answer.prompt_tokens}"
            )


def _run_of(case: Case, router: Router, sent: Sent, cores: dict[str, float]) -> Run:
    num_warm_up = case.workload.num_warm_up
    good = [answer for answer in sent.answers[num_warm_up:] if not answer.failure]
    failures = [answer.failure for answer in sent.answers if answer.failure]
    ttfts = [1e3 * answer.ttft_s for answer in good]
    return Run(
        workload=case.workload.name,
        load=case.load,
        form=case.form,
        router=router.name,
        seed=case.seed,
        rate=case.rate,
        rps=answers_per_s(sent.answers, num_warm_up),
        ttft_mean=fmean(ttfts) if ttfts else 0.0,
        ttft_p90=percentile(ttfts, 90),
        total_mean=1e3 * fmean(a.total_s for a in good) if good else 0.0,
        cached=sum(a.cached_tokens for a in good) / max(1, sum(a.prompt_tokens for a in good)),
        failed=len(failures),
        failure=failures[0] if failures else "",
        digest=sent.digest,
        wall_s=sent.wall_s,
        late_ms=1e3 * fmean(sent.lateness_s),
        cores=cores,
    )


def answers_per_s(answers: Sequence[Answer], num_warm_up: int) -> float:
    """From the answer that ends the warm-up to the last one; failures are none."""
    ends = sorted(answer.due_s + answer.total_s for answer in answers if not answer.failure)
    counted = ends[num_warm_up - 1 :] if num_warm_up else [0.0, *ends]
    return (len(counted) - 1) / (counted[-1] - counted[0]) if len(counted) > 1 else 0.0
