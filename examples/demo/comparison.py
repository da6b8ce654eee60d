"""The demo itself: a fleet, the same requests under two policies, one table.

In:  the kind of engine, how many requests.   Out: the results of each policy.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from examples.demo.client import Outcome, send_all
from examples.demo.fleets import FLEETS, Fleet
from examples.demo.report import PolicyResult, print_report
from examples.demo.workload import MAX_TOKENS, ChatRequest, chat_request, make_requests
from examples.launch.engine_server import EngineServer
from examples.launch.router_process import RouterProcess

POLICIES = ("round_robin", "kv")
STOP_LIMIT_S = 5.0


def run(
    kind: str, num_requests: int | None, *, log_dir: Path, console: Console, cleanup: ExitStack
) -> Sequence[PolicyResult]:
    """Run the whole comparison; what was started stops when `cleanup` closes."""
    fleet = FLEETS[kind](log_dir)
    start_engines(fleet.engines, console, cleanup)
    requests = make_requests(num_requests or fleet.num_requests, fleet.num_documents)
    results = [
        measure(policy, fleet, requests, log_dir=log_dir, console=console) for policy in POLICIES
    ]
    print_report(console, results)
    return results


def start_engines(engines: Sequence[EngineServer], console: Console, cleanup: ExitStack) -> None:
    """Start them side by side, and have each of them answer once."""
    with progress_bar(console, f"start {len(engines)} engines", len(engines)) as advance:
        cleanup.callback(stop_engines, engines)
        for engine in engines:
            engine.start()
        for engine in engines:
            engine.wait_ready()
            engine.complete("Hello", max_tokens=MAX_TOKENS)
            advance()


def stop_engines(engines: Sequence[EngineServer]) -> None:
    """Stop them side by side: one that is still starting hears SIGTERM late."""
    for engine in engines:
        engine.process.ask_to_stop()
    for engine in engines:
        engine.stop(limit_s=STOP_LIMIT_S)


def measure(
    policy: str,
    fleet: Fleet,
    requests: Sequence[ChatRequest],
    *,
    log_dir: Path,
    console: Console,
) -> PolicyResult:
    """The requests under one policy, from empty caches, through a router of its own."""
    # What only the first requests pay must not fall to a policy; too short to leave a block.
    warm_up = [chat_request("", "Hello")] * (2 * len(fleet.engines))
    router_process = RouterProcess(
        policy,
        fleet.engines,
        model_dir=fleet.tokenizer_dir,
        log_dir=log_dir,
    )
    with router_process as router:
        router.wait_ready()
        for engine in fleet.engines:
            engine.empty_cache()  # the router hears of it, and knows that it knows all
        _send(warm_up, router.url, fleet.concurrency, on_outcome=lambda: None)
        with progress_bar(console, policy, len(requests)) as advance:
            started = time.perf_counter()
            outcomes = _send(requests, router.url, fleet.concurrency, on_outcome=advance)
            wall_s = time.perf_counter() - started
    return PolicyResult(policy, outcomes, wall_s)


@contextmanager
def progress_bar(console: Console, title: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar on the terminal; gives the function that moves it one step."""
    columns = (TextColumn("{task.description:<16}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task(title, total=total)
        yield lambda: progress.advance(task)


def _send(
    requests: Sequence[ChatRequest],
    url: str,
    concurrency: int,
    *,
    on_outcome: Callable[[], None],
) -> list[Outcome]:
    return asyncio.run(send_all(requests, url=url, concurrency=concurrency, on_outcome=on_outcome))
