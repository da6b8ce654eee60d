"""An ordinary day of a served router: python -m tests.resilience [--only NAME ...].

In:  nothing; clients, engines and the router are started here, on loopback.
Out: a row for each kind of trouble; exit code 1 if a healthy worker went down, a request got what
it must not get, an event was lost, or a wrong cache was trusted.
"""

import argparse
import asyncio
import time

from tests.resilience.client_trouble import idle_connections, large_bodies, many_streams
from tests.resilience.event_trouble import dead_replay, many_workers, swapped_replay
from tests.resilience.load_trouble import (
    cancelled_streams,
    killed_worker,
    migrated_streams,
    restarted_router,
    slow_others,
)
from tests.resilience.worker_trouble import keep_alive, poison

SCENARIOS = (
    idle_connections,
    many_streams,
    large_bodies,
    keep_alive,
    poison,
    many_workers,
    swapped_replay,
    dead_replay,
    cancelled_streams,
    killed_worker,
    migrated_streams,
    slow_others,
    restarted_router,
)


def main():
    by_name = {scenario.__name__: scenario for scenario in SCENARIOS}
    parser = argparse.ArgumentParser(prog="python -m tests.resilience")
    parser.add_argument("--only", nargs="+", choices=by_name, default=list(by_name), metavar="NAME")
    is_bad = False
    for name in parser.parse_args().only:
        is_bad |= _run(name, by_name[name])
    return int(is_bad)


def _run(name, scenario):
    """Whether it went wrong; a scenario gives what it saw and what must not be."""
    began_at = time.monotonic()
    seen, defects = asyncio.run(scenario())
    print(f"{name:17} {time.monotonic() - began_at:4.0f} s  {seen}")
    for defect in defects:
        print(f"{'':17} WRONG: {defect}")
    return bool(defects)


if __name__ == "__main__":
    raise SystemExit(main())
