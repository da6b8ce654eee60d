"""`make differential`: kvplug's cost in blocks beside Dynamo's, in thousands of random states.

usage: python -m tests.differential [--states N] [--first-seed N] [--only PROFILE[,PROFILE]]

A state is a fleet of 2 to 6 workers with blocks of random prefixes and live requests, and a prompt.
Dynamo's overlap scores, potential loads and choice are compared with kvplug's. Ends with an error
at the first difference that no rule explains. Writes bench-results/differential.json.
"""

from __future__ import annotations

import argparse
import json

from rich.console import Console

from kvplug.sim.replay.report import markdown
from tests.benchmarks.sides import ROOT
from tests.differential.fleet import Counts, run
from tests.differential.profiles import PROFILES

RESULTS = ROOT / "bench-results" / "differential.json"
_TIMES_OF_DEFAULTS = 3
_HEADER = ["settings", "states", "equal", "choices", "ties", "gap", "order", "loaded", "stale"]
_LEGEND = """\
equal: states without a difference: overlap, potential prefill tokens and decode blocks, costs
choices: states in which Dynamo's choice was required to be among the cheapest of kvplug, and was
ties: of these, with several cheapest workers; either side takes any of them
gap, order, loaded, stale: states that differ on purpose, for this reason; a state can have several.
Each side did what its own rules say: tests/differential/reference.py and active.py have them"""

console = Console(width=150, highlight=False)


def main() -> None:
    """Run, print, write."""
    options = _options()
    chosen = [p for p in PROFILES if not options.only or p.name in options.only.split(",")]
    results: dict[str, Counts] = {}
    for profile in chosen:
        times = _TIMES_OF_DEFAULTS if profile.name == "defaults" else 1
        results[profile.name] = run(profile, times * options.states, options.first_seed)
        console.print(f"{profile.name}: {profile.meaning}")
    rows = [_row(name, counts) for name, counts in results.items()]
    console.print(markdown(_HEADER, rows), _LEGEND, sep="\n\n")
    first_of_two = [
        sum(counts.first_of_two[side] for counts in results.values()) for side in (0, 1)
    ]
    pairs = sum(counts.ties[2] for counts in results.values())
    console.print(f"of {pairs} ties of two, kvplug and Dynamo took the first {first_of_two} times")
    _write(results)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.differential")
    parser.add_argument("--states", type=int, default=1000, help="with each settings (1000)")
    parser.add_argument("--first-seed", type=int, default=0, help="N and up (0)")
    parser.add_argument("--only", default="", help="names of settings")
    return parser.parse_args()


def _row(name: str, counts: Counts) -> list[str]:
    numbers = counts.states, counts.equal, counts.choices, sum(counts.ties.values())
    reasons = [counts.reasons[reason] for reason in ("gap", "order", "loaded", "stale")]
    return [name, *(f"{number:,}" for number in (*numbers, *reasons))]


def _write(results: dict[str, Counts]) -> None:
    RESULTS.parent.mkdir(exist_ok=True)
    content = {name: counts.as_json() for name, counts in results.items()}
    RESULTS.write_text(json.dumps(content, indent=1) + "\n")
    console.print(f"wrote {RESULTS.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
