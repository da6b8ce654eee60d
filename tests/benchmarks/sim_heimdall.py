"""`make sim-heimdall`: the example of Heimdall's documentation, calibrated and predicted.

usage: python -m tests.benchmarks.sim_heimdall [--processes N]

Published are P50, P75, P90 of the time to first token under random routing and under its prefix
cache-aware routing, about 20 times less at P50. What is not published is swept: how large the
caches are, how many requests a stage has, whether it waits for the stage before, how fast answers
are decoded. Each setting's prefill rate is calibrated on the random row alone (heimdall_fit.py);
the setting that fits best is the one at which all policies are compared, and every setting that
fits to within a third predicts the ratio of kvplug's router. Nothing is fitted to the other row.

Prints tables; writes bench-results/sim-heimdall.json and .png. Ends with status 1 if a kv policy is
worse than least_loaded at any load beyond the 95 % interval.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from multiprocessing import get_context
from typing import Any, Final, TypeVar

from rich.console import Console
from tqdm import tqdm

from tests.benchmarks.heimdall_fit import PRECISE_S, RANDOM_S, Fit, fit
from tests.benchmarks.heimdall_report import (
    POLICIES,
    Difference,
    Interval,
    Results,
    content_of,
    differences,
    differences_table,
    fits_table,
    loads_table,
    mean_percentiles_s,
    policies_table,
    ratios,
    save_plot,
    stages_table,
)
from tests.benchmarks.heimdall_run import BLOCK_SIZE, Job, Setting, run
from tests.benchmarks.sides import ROOT

SEEDS: Final = (1, 2, 3, 4, 5)
CACHE_TOKENS = (600_000, 900_000, 1_200_000)
REQUESTS_PER_STAGE = (460, 690, 1150)
GREATEST_ERROR: Final = 1 / 3
PUBLISHED_BLOCK_SIZE: Final = 32
KV: Final = ("kv:blocks=1", "kv")
JSON, PLOT = (ROOT / "bench-results" / f"sim-heimdall.{kind}" for kind in ("json", "png"))

console = Console(width=190, highlight=False)

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class Workers:
    """Processes that take jobs; answers come in the order of the jobs."""

    def __init__(self, num_processes: int) -> None:
        self._pool = ProcessPoolExecutor(num_processes, get_context("spawn"))

    def map(self, what: str, call: Callable[[Item], Answer], items: Sequence[Item]) -> list[Answer]:
        """One answer each."""
        answers = self._pool.map(call, items)
        return list(tqdm(answers, desc=what, total=len(items), leave=False))


def main(arguments: Sequence[str] | None = None) -> int:
    """Calibrate, predict, print, write; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.sim_heimdall")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)), metavar="N")
    workers = Workers(parser.parse_args(arguments).processes)
    fits = calibrated(workers)
    best = min(fits, key=lambda each: each.error)
    results = by_policy(workers, best.setting, POLICIES)
    predicted = predictions(workers, fits)
    blocks = by_policy(workers, best.setting, ("random", "kv"), (1,), PUBLISHED_BLOCK_SIZE)
    against = differences(results, KV)
    num_worse = sum(each.is_worse for each in against)
    console.print(fits_table(fits, predicted), policies_table(results), sep="\n")
    console.print(loads_table(results), stages_table(results), sep="\n")
    console.print(differences_table(against))
    console.print(range_line(predicted), _blocks_line(results, blocks), sep="\n")
    console.print(f"worse than least_loaded beyond the interval: {num_worse} of {len(against)}")
    write(fits, predicted, results, against)
    return 1 if num_worse else 0


def calibrated(workers: Workers) -> list[Fit]:
    """Each setting with the prefill rate that fits it best; slower and faster decoding for the one
    that fits best of all.
    """
    settings = [
        Setting(cache_tokens=tokens, requests_per_stage=count)
        for count in REQUESTS_PER_STAGE
        for tokens in CACHE_TOKENS
    ]
    settings += [replace(each, pauses=False) for each in settings if each.cache_tokens == 900_000]
    fits = workers.map("calibrating", fit, settings)
    best = min(fits, key=lambda each: each.error)
    others = [replace(best.setting, decode_factor=factor) for factor in (0.5, 2.0)]
    return fits + workers.map("calibrating", fit, others)


def predictions(workers: Workers, fits: Sequence[Fit]) -> dict[int, list[Interval]]:
    """By number of the fit: how many times sooner under kv in ms, where the setting fits."""
    return {
        number: ratios(by_policy(workers, each.setting, ("random", "kv")), "kv")
        for number, each in enumerate(fits)
        if each.error <= GREATEST_ERROR
    }


def by_policy(
    workers: Workers,
    setting: Setting,
    policies: Sequence[str],
    seeds: Sequence[int] = SEEDS,
    block_size: int = BLOCK_SIZE,
) -> Results:
    """The same requests under each policy, for each seed."""
    jobs = [
        Job(setting=setting, policy=policy, seed=seed, block_size=block_size)
        for policy in policies
        for seed in seeds
    ]
    results = iter(workers.map("predicting", run, jobs))
    return {policy: [next(results) for _ in seeds] for policy in policies}


def range_line(predicted: dict[int, list[Interval]]) -> str:
    """How far the settings that fit are from each other."""
    p50 = [sooner[0].mean for sooner in predicted.values()]
    published = RANDOM_S[0] / PRECISE_S[0]
    return (
        f"{len(p50)} settings fit the random row to within a third; they predict kv in ms to be "
        f"{min(p50):.1f} to {max(p50):.1f} times sooner at P50 (published: {published:.1f})"
    )


def _blocks_line(results: Results, blocks: Results) -> str:
    cells = []
    for policy, (result,) in blocks.items():
        ours = ", ".join(f"{each:.3f}" for each in results[policy][0].percentiles_s())
        theirs = ", ".join(f"{each:.3f}" for each in result.percentiles_s())
        cells.append(f"{policy} {theirs} s, not {ours}")
    return (
        f"in blocks of {PUBLISHED_BLOCK_SIZE} tokens instead of {BLOCK_SIZE}, one seed: "
        + "; ".join(cells)
    )


def write(
    fits: Sequence[Fit],
    predicted: dict[int, list[Interval]],
    results: Results,
    against: Sequence[Difference],
) -> None:
    """The file and the plot."""
    best = min(fits, key=lambda each: each.error)
    content: dict[str, Any] = {
        "published_s": {"random": RANDOM_S.tolist(), "cache_aware": PRECISE_S.tolist()},
        "settings": [
            {
                **asdict(each.setting),
                "random_s": each.percentiles_s.tolist(),
                "error": each.error,
                "is_best": each is best,
                "kv_times_sooner": [[r.mean, r.low, r.high] for r in predicted.get(number, [])],
            }
            for number, each in enumerate(fits)
        ],
        "random_at_other_seeds_s": mean_percentiles_s(results["random"]).tolist(),
        "policies": content_of(results),
        "slower_than_least_loaded": [
            {**asdict(each), "is_worse": each.is_worse} for each in against
        ],
    }
    JSON.parent.mkdir(exist_ok=True)
    JSON.write_text(json.dumps(content, indent=1) + "\n")
    save_plot(results, PLOT)


if __name__ == "__main__":
    sys.exit(main())
