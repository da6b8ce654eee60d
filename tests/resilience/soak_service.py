"""`make soak-service`: the router under mixed load for as long as it is told; is its memory flat?

usage: python -m tests.resilience.soak_service [--seconds N]

In:  nothing; four cheap engines and the router are started here.
Out: a row for each period; exit code 1 if memory grew, or a request got what it must not get.

In each period there are ever-new prompts as text and as token ids, streams and whole answers,
requests that are refused, and streams whose client leaves after the first event.
"""

import argparse
import asyncio
import contextlib
import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from examples.launch.endpoint import Endpoint
from examples.launch.engine_server import MODEL_NAME
from tests.benchmarks.outcome_requests import Writer
from tests.benchmarks.service_client import Open, post, send
from tests.benchmarks.service_routers import CONTESTANTS, cheap_fleet, opened
from tests.resilience.raw_streams import RawStream

PERIOD_S = 5.0
RATE, NUM_LEAVING = 150.0, 20
NUM_PROMPTS = round(RATE * (PERIOD_S - 1.0))
ALLOWED_GROWTH, ALLOWED_GROWTH_MB = 1.03, 8.0
REFUSED = (b"{", b"[]", b'{"model": "nobody", "prompt": "a"}', b'{"prompt": 7, "model": 8}')
[ROUTER] = [each for each in CONTESTANTS if each.name == "kvplug_kv"]


@dataclass
class Seen:
    """After each period, the router's memory in MB; what should not have been."""

    memory_mb: list[float] = field(default_factory=list)
    num_requests: int = 0
    defects: list[str] = field(default_factory=list)

    def grown_mb(self):
        """From the second third to the last one; in the first one caches and pools fill."""
        third = max(1, len(self.memory_mb) // 3)
        return max(self.memory_mb[-third:]) - max(self.memory_mb[: 2 * third])


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.resilience.soak_service")
    parser.add_argument("--seconds", type=float, default=600.0, metavar="N", help="how long (600)")
    seen = soak(parser.parse_args().seconds)
    for defect in seen.defects:
        print(f"WRONG: {defect}")
    return int(bool(seen.defects))


def soak(seconds):
    """What was seen."""
    seen, ends = Seen(), max(3, round(seconds / PERIOD_S))
    with (
        tempfile.TemporaryDirectory(prefix="kvplug-soak-") as folder,
        cheap_fleet(Path(folder)) as fleet,
        opened(ROUTER, fleet, Path(folder)) as front,
    ):
        for number in range(ends):
            _period(front.urls, number, seen)
            seen.memory_mb.append(front.own_memory_mb())
            print(
                f"{(number + 1) * PERIOD_S:5.0f} s  {seen.num_requests:8,} requests  "
                f"{seen.memory_mb[-1]:6.1f} MB",
                flush=True,
            )
        _check_end(front.urls[0], seen)
    allowed_mb = ALLOWED_GROWTH_MB + (ALLOWED_GROWTH - 1) * max(seen.memory_mb)
    if seen.grown_mb() > allowed_mb:
        seen.defects.append(f"memory grew by {seen.grown_mb():.1f} MB, allowed {allowed_mb:.1f}")
    return seen


def _period(urls, number, seen):
    answers = send(urls, _requests(number), Open(RATE, number))
    seen.num_requests += len(answers)
    failures = [answer.failure for answer in answers if answer.failure]
    if failures:
        seen.defects.append(f"{len(failures)} requests failed: {failures[0]}")
    refused = send(urls, [post(body) for body in REFUSED * 5], Open(200.0))
    if not all(each.failure.startswith("HTTP/1.1 4") for each in refused):
        seen.defects.append(f"not refused: {[each.failure[:40] for each in refused]}")
    asyncio.run(_leave(urls[0]))


def _requests(number):
    """New in each period."""
    writer = Writer(number)
    lengths = [writer.random.randint(10, 600) for _ in range(NUM_PROMPTS)]
    asks = [writer.completion(writer.words(n), writer.random.choice((1, 20))) for n in lengths]
    texts = [post(ask.body("text")) for ask in asks[::2]]
    whole = [json.loads(ask.body("ids")) | {"stream": False} for ask in asks[1::2]]
    for body in whole:
        del body["stream_options"]
    return [*texts, *(post(json.dumps(body).encode()) for body in whole)]


async def _leave(url):
    streams = [
        await RawStream.open(url, model=MODEL_NAME, max_tokens=1000) for _ in range(NUM_LEAVING)
    ]
    for stream in streams:
        with contextlib.suppress(ConnectionError):
            await stream.read_first()
        stream.cancel()


def _check_end(url, seen):
    health = Endpoint(int(url.rpartition(":")[2])).get("/health").body
    states = {worker["state"] for worker in health["workers"]}
    if states != {"up"}:
        seen.defects.append(f"workers are {states}")


if __name__ == "__main__":
    raise SystemExit(main())
