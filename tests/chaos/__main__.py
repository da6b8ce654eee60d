"""Faults between engines and a router: python -m tests.chaos [--engine sim] [--only NAME].

In:  engines, scenarios, a seed.   Out: a row per scenario; exit code 1 if one ends as it must not.
"""

import argparse
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from tests.chaos.engines import ENGINES
from tests.chaos.report import defects, header, row, spread
from tests.chaos.rig import Rig
from tests.chaos.scenarios import NUM_MESSAGES, SCENARIOS, scenarios


def main():
    arguments = _arguments()
    print(header(), flush=True)
    began_at, repairs_s, is_bad = time.monotonic(), defaultdict(list), False
    for engine_name, scenario, outcome in _run(arguments):
        is_bad |= _tell(engine_name, scenario, outcome, arguments.wire)
        if scenario.is_repairable or arguments.wire == "kvplug":
            repairs_s[engine_name] += outcome.repairs_s
    print()
    for engine_name, each in repairs_s.items():
        print(f"{engine_name}: {spread(each)}")
    took_s = time.monotonic() - began_at
    print(f"{took_s:.0f} s in all, wire {arguments.wire}, seed {arguments.seed}")
    return int(is_bad)


def _arguments():
    parser = argparse.ArgumentParser(prog="python -m tests.chaos")
    names = [scenario.name for scenario in SCENARIOS]
    parser.add_argument("--engine", nargs="+", choices=ENGINES, default=["vllm", "sglang"])
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="FAULT")
    parser.add_argument("--wire", choices=("vllm", "kvplug"), default="vllm")
    parser.add_argument("--messages", type=int, default=NUM_MESSAGES)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--logs", type=Path, help="an empty folder, where logs are kept")
    return parser.parse_args()


def _run(arguments):
    for engine_name in arguments.engine:
        yield from _run_engine(engine_name, arguments)


def _run_engine(engine_name, arguments):
    wanted = scenarios(arguments.only)
    for buffer_steps, together in groupby(wanted, key=lambda scenario: scenario.buffer_steps):
        with _folder(arguments.logs, f"{engine_name}-{buffer_steps}") as folder:
            kind = ENGINES[engine_name]
            engine = kind(folder, buffer_steps=buffer_steps, wire=arguments.wire)
            try:
                engine.start()
                engine.wait_ready()
                for scenario in together:
                    with Rig(engine, folder, arguments.seed, **scenario.rig) as rig:
                        yield engine.name, scenario, _outcome(scenario, rig, arguments.messages)
            finally:
                engine.process.stop()


@contextmanager
def _folder(logs, name):
    with tempfile.TemporaryDirectory(prefix="chaos-") as temporary:
        folder = logs / name if logs else Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        yield folder


def _outcome(scenario, rig, num_messages):
    try:
        return scenario.run(rig, num_messages)
    except AssertionError as error:  # a wait was in vain: the others still run
        return replace(rig.outcome(), reason=str(error), level="failed")


def _tell(engine_name, scenario, outcome, wire):
    print(row(engine_name, scenario.name, outcome), flush=True)
    for sentence in (found := defects(outcome, scenario.expects_on(wire))):
        print(f"    {scenario.name}: {sentence}; {outcome.reason}; {outcome.fix}", flush=True)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
