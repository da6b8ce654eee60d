"""What HTTP services have in common: an address, signals."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from kvplug.errors import TransportError
from kvplug.http_service import listening_on, stopped_by_signals, url_of

TWO_SIGNALS = """
import asyncio, os, signal
from kvplug.http_service import stopped_by_signals

async def main():
    stopping = stopped_by_signals()
    os.kill(os.getpid(), signal.SIGTERM)
    await stopping.wait()
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_a_url_has_brackets_around_an_ipv6_address():
    assert url_of("127.0.0.1", 80) == "http://127.0.0.1:80"
    assert url_of("::1", 80) == "http://[::1]:80"


def test_an_address_that_cannot_be_had_is_named():
    with (
        pytest.raises(TransportError, match="cannot listen on h:1: in use"),
        listening_on("h", 1),
    ):
        raise OSError(98, "in use")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_sets_the_event(number):
    stopping = stopped_by_signals()
    try:
        os.kill(os.getpid(), number)
        await asyncio.wait_for(stopping.wait(), 10)
    finally:
        for each in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().remove_signal_handler(each)


def test_a_second_signal_ends_the_process():
    run = subprocess.run([sys.executable, "-c", TWO_SIGNALS], timeout=60, check=False)
    assert run.returncode == 1
