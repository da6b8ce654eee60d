"""What passing an answer on costs: chunks, and requests of one token, per CPU second of the router.

In:  the router, and bare proxies on several stacks.   Out: bench-results/relay.json.

Each proxy is a process of its own before four engines, which are as cheap as can be, as are the
clients. The streams are paced so that the proxy is far from busy: a busy one finds several chunks
at a time and looks better. CPU time is the process's own, user and system, threads included.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import psutil
import uvloop
from numpy import diff

from tests.benchmarks.relay_bare import STACKS
from tests.benchmarks.relay_load import Engine, ask, serve, stream

_NUM_ENGINES: Final = 4
_NUM_STREAMS: Final = 50
_INTERVAL_S: Final = 0.02  # so 2,500 chunks per second
_NUM_CLIENTS: Final = 8
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
_RESULT: Final = Path("bench-results/relay.json")
_NGINX: Final = "nginx"  # with the router's decisions
_PROXIES: Final = ("kvplug", _NGINX, *STACKS)


def _cpu_s(pid: int) -> float:
    """Of a process and all that it has started."""
    process, seconds = psutil.Process(pid), 0.0
    for each in (process, *process.children(recursive=True)):
        fields = Path(f"/proc/{each.pid}/stat").read_text().rpartition(")")[2].split()
        seconds += (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
    return seconds


def _command(proxy: str, ports: list[int]) -> list[str]:
    if proxy in STACKS:
        return ["-m", "tests.benchmarks.relay_bare", proxy, *map(str, ports)]
    workers = [flag for port in ports for flag in ("--worker", f"http://127.0.0.1:{port}")]
    flags = ["--port", "0", "--block-size", "16", "--health-interval-s", "60"]
    module = "tests.benchmarks.nginx_router" if proxy == _NGINX else "kvplug.router"
    return ["-m", module, *flags, *workers]


@asynccontextmanager
async def _running(proxy: str, ports: list[int]) -> AsyncIterator[tuple[int, int]]:
    """(process id, port) of a proxy before the engines at these ports."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *_command(proxy, ports),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    assert process.stdout is not None
    try:
        line = b""
        while b"listening on" not in line:
            line = await process.stdout.readline()
            assert line, f"{proxy} did not start"
        word = line.partition(b"listening on ")[2].removeprefix(b"port ").split(b",")[0]
        yield process.pid, int(word.rpartition(b":")[2])
    finally:
        process.terminate()
        await process.wait()


async def measure(proxy: str, *, num_chunks: int, num_requests: int, num_rounds: int) -> dict:
    """Medians of the rounds."""
    engines = [Engine(num_chunks, _INTERVAL_S) for _ in range(_NUM_ENGINES)]
    servers = [await serve(engine) for engine in engines]
    ports = [server.sockets[0].getsockname()[1] for server in servers]
    ticking = [asyncio.create_task(engine.run()) for engine in engines]
    rounds: list[tuple[float, float]] = []
    try:
        async with _running(proxy, ports) as (pid, port):
            await ask(port, _NUM_CLIENTS, 20)
            for _ in range(num_rounds):
                times_s = [_cpu_s(pid)]
                assert await stream(port, _NUM_STREAMS) == _NUM_STREAMS * num_chunks
                times_s.append(_cpu_s(pid))
                assert await ask(port, _NUM_CLIENTS, num_requests) == _NUM_CLIENTS * num_requests
                times_s.append(_cpu_s(pid))
                # A short run may end before the clock's next tick.
                for_chunks, for_requests = (max(each, 1 / _TICKS_PER_S) for each in diff(times_s))
                chunks = _NUM_STREAMS * num_chunks / for_chunks
                rounds.append((chunks, _NUM_CLIENTS * num_requests / for_requests))
    finally:
        for task in ticking:
            task.cancel()
        for server in servers:
            server.close()
    chunks, requests = (statistics.median(figures) for figures in zip(*rounds, strict=True))
    return {"chunks_per_cpu_s": round(chunks), "requests_per_cpu_s": round(requests)}


async def _main(arguments: argparse.Namespace) -> None:
    figures = {}
    for proxy in arguments.only or _PROXIES:
        figures[proxy] = await measure(
            proxy,
            num_chunks=arguments.chunks,
            num_requests=arguments.requests,
            num_rounds=arguments.rounds,
        )
        print(f"{proxy:20}", figures[proxy])  # noqa: T201
    _RESULT.parent.mkdir(exist_ok=True)
    _RESULT.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", type=lambda text: text.split(","))
    parser.add_argument("--chunks", type=int, default=300)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    uvloop.run(_main(parser.parse_args()))
