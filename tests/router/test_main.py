"""`python -m kvplug.router` as a process."""

import os
import re
import signal
import subprocess
import sys

import pytest

COMMAND = [sys.executable, "-m", "kvplug.router", "--port", "0", "--worker", "http://127.0.0.1:9"]


@pytest.fixture
def process():
    with subprocess.Popen(COMMAND, stderr=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def lines_until(process, pattern):
    lines = []
    for line in process.stderr:
        lines.append(line)
        if re.search(pattern, line):
            return "".join(lines)
    raise AssertionError(f"no line matches {pattern!r}: {''.join(lines)}")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_starts_with_no_worker_up_and_stops_on_a_signal(process, number):
    said = lines_until(process, r"listening on http://127\.0\.0\.1:\d+")
    assert "worker http://127.0.0.1:9 is not reachable" in said
    os.kill(process.pid, number)
    assert process.wait(timeout=20) == 0
    assert "Traceback" not in process.stderr.read()
