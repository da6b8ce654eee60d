"""What forwarding costs: python -m tests.benchmarks.forwarder --engines 50 --rate 1000.

In:  stock publishers in one process, each with an equal share of `rate` messages a second.
Out: CPU of `python -m kvplug.forwarder` per 1,000 messages a second, its memory, what was lost.

A message stores 16 blocks of 16 tokens, and removes those of a while ago, so that an engine holds
as much as it did.
"""

import argparse
import asyncio
import logging
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import psutil
import yaml

from kvplug import codec
from kvplug.engines.publisher import Publisher
from kvplug.engines.settings import PublisherConfig
from kvplug.events import BlockRemoved, BlockStored, EventBatch, Namespace
from tests.nats_servers import free_ports, nats_servers
from tests.plugins.nats_reader import make_stream

_BLOCKS, _SIZE = 16, 16
_WARM_S, _START_LIMIT_S = 5.0, 60.0


def measure(num_engines, rate, seconds, num_held):
    """(CPU seconds per 1,000 messages, messages/s, MB, blocks held) of the forwarder."""
    with nats_servers() as [node], tempfile.TemporaryDirectory() as folder:
        asyncio.run(make_stream(node.url, max_bytes=2**30))
        ports = free_ports(2 * num_engines)
        status = free_ports(1)[0]
        file = Path(folder) / "forwarder.yaml"
        file.write_text(yaml.safe_dump(settings(node.url, ports, status)))
        forwarder = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "kvplug.forwarder",
                "--config",
                str(file),
                "--log-level",
                "warning",
            ]
        )
        arguments = [str(rate), str(num_held), *map(str, ports)]
        engines = subprocess.Popen([sys.executable, "-m", __spec__.name, "--publish", *arguments])
        try:
            return _measured(forwarder, status, seconds)
        finally:
            for each in (engines, forwarder):
                each.terminate()
                each.wait(20)


def settings(url, ports, status):
    engines = [
        {
            "worker_id": f"http://10.0.0.{number}:8000",
            "kv_block_size": _SIZE,
            "zmq_endpoint": f"tcp://127.0.0.1:{events}",
            "zmq_replay_endpoint": f"tcp://127.0.0.1:{replay}",
        }
        for number, (events, replay) in enumerate(zip(ports[::2], ports[1::2], strict=True))
    ]
    return {"nats": url, "port": status, "engines": engines}


def _measured(forwarder, status, seconds):
    process = psutil.Process(forwarder.pid)
    _await_messages(status)
    time.sleep(_WARM_S)
    before, began = (sum(process.cpu_times()[:2]), counts(status)), time.monotonic()
    time.sleep(seconds)
    after, took = (sum(process.cpu_times()[:2]), counts(status)), time.monotonic() - began
    num = after[1]["messages_total"] - before[1]["messages_total"]
    for name in ("dropped_total", "skipped_total"):
        if after[1][name]:
            sys.stdout.write(f"{name}: {after[1][name]:.0f}\n")
    cpu_s = after[0] - before[0]
    return 1000 * cpu_s / num, num / took, process.memory_info().rss / 1e6, after[1]["blocks"]


def _await_messages(status):
    deadline = time.monotonic() + _START_LIMIT_S
    while time.monotonic() < deadline:
        with suppress(OSError):
            if counts(status)["messages_total"]:
                return
        time.sleep(0.1)
    raise AssertionError(f"no message was forwarded within {_START_LIMIT_S:g} s")


def counts(port):
    """The forwarder's metrics, each summed over engines."""
    sums = {}
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        for line in answer.read().decode().splitlines():
            if not line.startswith("#"):
                name = line.partition("{")[0].partition(" ")[0].removeprefix("kvplug_forwarder_")
                sums[name] = sums.get(name, 0.0) + float(line.rpartition(" ")[2])
    return sums


def publish(rate, num_held, ports):
    """Stock publishers, until the end of this process."""
    engines = [
        Publisher(
            PublisherConfig(
                endpoint=f"tcp://127.0.0.1:{events}", replay_endpoint=f"tcp://127.0.0.1:{replay}"
            ),
            0, codec.encode, logging.getLogger("tests.benchmarks"),
        )
        for events, replay in zip(ports[::2], ports[1::2], strict=True)
    ]  # fmt: skip
    started = time.monotonic()
    for number in range(2**60):
        turn, engine = divmod(number, len(engines))
        engines[engine].publish(batch(turn, num_held))
        time.sleep(max(0.0, started + number / rate - time.monotonic()))


def batch(turn, num_held):
    first = _BLOCKS * turn
    events = [
        BlockStored(
            block_hashes=tuple(range(first, first + _BLOCKS)),
            token_ids=tuple(range(first, first + _BLOCKS * _SIZE)),
            block_size=_SIZE, namespace=Namespace(),
        )
    ]  # fmt: skip
    old = first - num_held
    if old >= 0:
        events.append(BlockRemoved(block_hashes=tuple(range(old, old + _BLOCKS))))
    return EventBatch(events=tuple(events), dp_rank=0, ts=time.time())


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.forwarder")
    parser.add_argument("--engines", type=int, default=50)
    parser.add_argument("--rate", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--held", type=int, default=10_000, help="blocks per engine")
    parser.add_argument("--publish", nargs="+", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.publish:
        rate, num_held, *ports = arguments.publish
        publish(rate, num_held, ports)
        return
    cpu, rate, memory, blocks = measure(
        arguments.engines, arguments.rate, arguments.seconds, arguments.held
    )
    sys.stdout.write(
        f"{arguments.engines} engines, {rate:.0f} messages/s: {cpu:.2f} CPU seconds per 1,000 "
        f"messages, {memory:.0f} MB, {blocks:.0f} blocks\n"
    )


if __name__ == "__main__":
    main()
