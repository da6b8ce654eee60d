"""`make bench-service`: what the router costs as a service, beside its peers and beside none.

usage: python -m tests.benchmarks.service [--rounds N] [--routers NAME[,NAME]] [--short]
                                          [--results DIR]

The same four engines, the same client, router by router in turn, in rounds: tests/benchmarks/
service_run.py has the parts. What is measured is kept in bench-results/service.json:

    {"routers": {router: {metric: {"value": median of the rounds, "low", "high"}, "failed"}},
     "targets": [{"metric", "kvplug", "peer", "peer_name", "ratio", "limit", "met"}], ...}

`added_*` is the time to the first chunk less that of the direct round beside it. CPU seconds are
those of the router's processes. Exit code 1 if a request failed.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from rich.console import Console
from tokenizers import Tokenizer

from examples.launch.errors import LaunchError
from tests.benchmarks.outcome_requests import Ask, Writer, tokenize, tokenizer_folder
from tests.benchmarks.service_report import Results, print_results
from tests.benchmarks.service_routers import CONTESTANTS, DIRECT, Contestant
from tests.benchmarks.service_run import PROMPT_TOKENS, Lengths, Measured, measure
from tests.benchmarks.sides import ROOT

SHORT: Final = Lengths(num_warm_up=0, num_sharing=24, num_prompts=10, seconds=0.4)

console = Console(width=190)


def main() -> int:
    """Measure, print, write."""
    options = _options()
    contestants = [each for each in _chosen(options.routers) if _is_there(each)]
    tokenize_ms = {"tokenizers": _fastest_ms(_by_tokenizers()), "kvplug": _fastest_ms(tokenize)}
    for name, ms in tokenize_ms.items():
        console.print(f"tokenizing {PROMPT_TOKENS} tokens of text takes {name} {ms:.2f} ms")
    results = Results(options.results, tokenize_ms)
    lengths = SHORT if options.short else Lengths()
    for turn in range(options.rounds):
        for contestant in _in_turn(contestants, turn):
            _measure(contestant, lengths, turn, results)
        results.write({"rounds": turn + 1, "cpus": os.cpu_count(), "at": time.strftime("%F %T")})
    print_results(console, results, contestants)
    return int(any(results.failed.values()))


def _measure(contestant: Contestant, lengths: Lengths, turn: int, results: Results) -> None:
    began = time.monotonic()
    measured = _again_once(contestant, lengths, turn)
    results.add(contestant.name, measured)
    bad = f", {measured.failed} FAILED: {measured.failure}" if measured.failed else ""
    seconds = time.monotonic() - began
    console.print(f"round {turn + 1} {contestant.name}: {seconds:.0f} s{bad}", highlight=False)


def _again_once(contestant: Contestant, lengths: Lengths, turn: int) -> Measured:
    """An hour of measuring should not end because a port was taken."""
    try:
        return measure(contestant, lengths, turn + 1)
    except LaunchError as error:
        log_tail = "\n".join(getattr(error, "__notes__", ()))
        console.print(f"{contestant.name}, once more: {error}\n{log_tail}")
        return measure(contestant, lengths, turn + 1)


def _in_turn(contestants: list[Contestant], turn: int) -> list[Contestant]:
    """Each round begins with another one."""
    turn %= len(contestants)
    return contestants[turn:] + contestants[:turn]


def _is_there(contestant: Contestant) -> bool:
    if reason := contestant.missing():
        console.print(reason)
    for form, why in contestant.refuses.items():
        console.print(f"{contestant.name} has no {form}: {why}")
    return not reason


def _chosen(names: str) -> list[Contestant]:
    known = [each.name for each in CONTESTANTS]
    wanted = {*names.split(","), DIRECT} if names else set(known)
    if unknown := wanted - set(known):
        raise SystemExit(
            f"--routers: expected some of {', '.join(known)}; got {', '.join(sorted(unknown))}"
        )
    return [each for each in CONTESTANTS if each.name in wanted]


def _by_tokenizers() -> Callable[[Ask], object]:
    """As the engines of this benchmark do it, and vLLM."""
    backend = Tokenizer.from_file(str(tokenizer_folder() / "tokenizer.json"))
    return lambda ask: backend.encode(str(ask.text)).ids


def _fastest_ms(encode: Callable[[Ask], object]) -> float:
    """Of some prompts: what a router that tokenizes cannot avoid."""
    writer, durations = Writer(9), []
    for _ in range(10):
        ask = writer.completion(writer.words(PROMPT_TOKENS), 1)
        began = time.perf_counter()
        encode(ask)
        durations.append(time.perf_counter() - began)
    return 1e3 * min(durations)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.service")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="of all routers (3)")
    parser.add_argument("--routers", default="", metavar="NAME[,NAME]", help="these, and direct")
    parser.add_argument("--short", action="store_true", help="a few requests: does it work?")
    parser.add_argument("--results", type=Path, default=ROOT / "bench-results", metavar="DIR")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
