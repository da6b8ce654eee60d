"""Faults of a cluster: python -m tests.chaos_cluster [--engine sim vllm] [--only NAME ...].

In:  engines, scenarios, a seed.   Out: a row per scenario; exit code 1 if one ends as it must not.
"""

import argparse
import sys
import tempfile
import time
import traceback
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path

from tests.chaos_cluster.engines import ENGINES
from tests.chaos_cluster.report import defects, header, row
from tests.chaos_cluster.rig import Rig
from tests.chaos_cluster.scenarios import SCENARIOS, scenarios
from tests.chaos_cluster.servers import can_mount


def main():
    arguments = _arguments()
    print(header(), flush=True)
    began_s, is_bad, longest_s = time.monotonic(), False, 0.0
    for kind, scenario, outcome in _run(arguments):
        is_bad |= _tell(kind, scenario, outcome)
        longest_s = max(longest_s, outcome.wrong.seconds if outcome else 0.0)
    print(
        f"\nlongest time that a wrong block was called EXACT: {longest_s:.1f} s; "
        f"{time.monotonic() - began_s:.0f} s in all, seed {arguments.seed}"
    )
    return int(is_bad)


def _arguments():
    parser = argparse.ArgumentParser(prog="python -m tests.chaos_cluster")
    names = [scenario.name for scenario in SCENARIOS]
    parser.add_argument("--engine", nargs="+", choices=ENGINES, default=["vllm"])
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="FAULT")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--logs", type=Path, help="an empty folder, where logs are kept")
    return parser.parse_args()


def _run(arguments):
    for kind in arguments.engine:
        for nodes, together in groupby(scenarios(arguments.only), key=lambda each: each.nodes):
            with _folder(arguments.logs, f"{kind}-{nodes}") as folder:
                yield from _run_beside(ENGINES[kind], nodes, list(together), folder, arguments.seed)


def _run_beside(kind, num_nodes, together, folder, seed):
    """A scenario that fails leaves nothing to the next one: that begins with a rig of its own."""
    left, number = list(together), 0
    while left:
        number += 1
        rig_folder = folder / str(number)
        rig_folder.mkdir(parents=True)
        has_disk = num_nodes == 1 and can_mount()
        with Rig(kind, rig_folder, num_nodes=num_nodes, has_small_disk=has_disk, seed=seed) as rig:
            while left:
                scenario = left.pop(0)
                if scenario.needs_disk and not has_disk:
                    print(f"{scenario.name}: left out, no tmpfs can be mounted", flush=True)
                    continue
                outcome = _outcome(scenario, rig)
                yield kind, scenario, outcome
                if outcome is None or defects(outcome):
                    break


def _outcome(scenario, rig):
    try:
        return scenario.run(rig)
    except Exception:  # noqa: BLE001 - it is printed, and the others still run
        traceback.print_exc()
        return None


@contextmanager
def _folder(logs, name):
    with tempfile.TemporaryDirectory(prefix="chaos-") as temporary:
        folder = logs / name if logs else Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        yield folder


def _tell(kind, scenario, outcome):
    if outcome is None:
        print(f"| {kind.kind} | {scenario.name} | failed |", flush=True)
        return True
    print(row(kind.kind, scenario.name, outcome), flush=True)
    for sentence in (found := defects(outcome)):
        print(f"    {scenario.name}: {sentence}", flush=True)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
