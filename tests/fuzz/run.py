"""As many damaged messages as fit into a time: `python -m tests.fuzz.run --seconds 60`.

In:  a time or a number of messages, a seed.   Out: a line per report, 0 if every rule held.

Memory is sampled after a warm-up, in which tables and caches grow to their size; from then on it
may grow by MAX_GROWTH_BYTES, no more.
"""

import argparse
import logging
import random
import sys
import time
import traceback
from dataclasses import dataclass, field

import psutil

from tests.fuzz.target import TARGETS

MAX_GROWTH_BYTES = 16 * 2**20
_COMPARE_EVERY = 50
_CHECK_EVERY = 5_000
_CLEAR_EVERY = 2_000
_WARM_UP = 50_000
_MAX_FAILURES = 10


@dataclass
class Report:
    """What a run saw; `failures` are texts that say what broke and with which message."""

    num_messages: int = 0
    num_accepted: int = 0
    num_compared: int = 0
    elapsed_s: float = 0.0
    growth_bytes: int | None = None
    rejected: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def __str__(self):
        rate = self.num_messages / self.elapsed_s if self.elapsed_s else 0.0
        growth = "-" if self.growth_bytes is None else f"{self.growth_bytes / 2**20:.1f} MiB"
        return (
            f"{self.num_messages:,} messages in {self.elapsed_s:.1f} s, {60 * rate:,.0f} a minute; "
            f"{self.num_accepted:,} changed the index, {self.num_compared:,} compared in full, "
            f"memory grew by {growth} after the warm-up, {len(self.failures)} failures; refused: "
            + ", ".join(f"{reason} {count:,}" for reason, count in sorted(self.rejected.items()))
        )


class Memory:
    """How much the process has grown since the warm-up ended."""

    def __init__(self):
        self._process = psutil.Process()
        self._baseline = None

    def growth_bytes(self, num_messages):
        """None during the warm-up."""
        if num_messages < _WARM_UP:
            return None
        resident = self._process.memory_info().rss
        if self._baseline is None:
            self._baseline = resident
        return resident - self._baseline


def fuzz(target_name, seed, *, seconds=float("inf"), count=float("inf")):
    """Damage messages until the time or the count is reached."""
    rng = random.Random(seed)
    target, memory = TARGETS[target_name](rng), Memory()
    report, started_at = Report(), time.monotonic()
    while report.num_messages < count and report.elapsed_s < seconds:
        for _ in range(min(_COMPARE_EVERY, count - report.num_messages)):
            _step(target, report)
        report.elapsed_s = time.monotonic() - started_at
        if report.num_messages % _CHECK_EVERY == 0:
            report.growth_bytes = memory.growth_bytes(report.num_messages)
            if (report.growth_bytes or 0) > MAX_GROWTH_BYTES:
                report.failures.append(f"memory grew by {report.growth_bytes:,} bytes")
        if len(report.failures) >= _MAX_FAILURES:
            break
    report.num_accepted, report.rejected = target.num_accepted, dict(target.follower.skipped)
    return report


def _step(target, report):
    mutator = target.mutator
    payload = mutator.payload()
    if report.num_messages % _CLEAR_EVERY == 0:
        payload = mutator.cleared()
    frames = mutator.frames(payload)
    report.num_messages += 1
    try:
        if report.num_messages % _COMPARE_EVERY == 0:
            report.num_compared += 1
            target.feed_and_compare(frames)
        else:
            target.feed(frames)
        if report.num_messages % _CHECK_EVERY == 0:
            target.check()
    except Exception:  # noqa: BLE001 - whatever it is, it is what we look for
        message = [frame.hex() for frame in frames]
        report.failures.append(f"{traceback.format_exc(limit=-3)}message: {message}")


def main():
    """Print a report per target; 1 if a rule broke."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--count", type=float, default=float("inf"))
    parser.add_argument("--seed", type=int, default=None, help="of a run to repeat")
    parser.add_argument("--target", choices=[*TARGETS, "all"], default="all")
    arguments = parser.parse_args()
    if min(arguments.seconds, arguments.count) == float("inf"):
        arguments.seconds = 60.0
    logging.disable(logging.CRITICAL)
    seed = random.randrange(2**32) if arguments.seed is None else arguments.seed
    names = TARGETS if arguments.target == "all" else [arguments.target]
    failed = False
    for name in names:
        report = fuzz(name, seed, seconds=arguments.seconds, count=arguments.count)
        print(f"{name}, seed {seed}: {report}", *report.failures, sep="\n")
        failed |= bool(report.failures)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
