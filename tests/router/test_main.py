"""`python -m kvplug.router` as a process."""

import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest

from tests.plain_kernels import with_plain_kernels
from tests.waiting import until

COMMAND = [sys.executable, "-m", "kvplug.router", "--port", "0", "--worker", "http://127.0.0.1:9"]
SIGNALS = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])

# In place of uvloop, the first that the router imports. A call back from C as LLVM makes them while
# it compiles: no exception gets out of it.
WAITS_FOR_EVER = """
import ctypes, sys, threading

@ctypes.CFUNCTYPE(None)
def wait():
    sys.stderr.write("importing\\n")
    threading.Event().wait()

wait()
"""


@contextmanager
def running(environment):
    with subprocess.Popen(COMMAND, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def process():
    with running(with_plain_kernels()) as process:
        yield process


def lines_until(process, pattern):
    lines = []
    for line in process.stderr:
        lines.append(line)
        if re.search(pattern, line):
            return "".join(lines)
    raise AssertionError(f"no line matches {pattern!r}: {''.join(lines)}")


@pytest.mark.slow
@SIGNALS
def test_it_starts_with_no_worker_up_and_stops_on_a_signal(process, number):
    said = lines_until(process, r"listening on http://127\.0\.0\.1:\d+")
    assert "worker http://127.0.0.1:9 is not reachable" in said
    os.kill(process.pid, number)
    assert process.wait(timeout=20) == 0
    assert "Traceback" not in process.stderr.read()


def require_quiet_end(process, number, allowed=""):
    os.kill(process.pid, number)
    assert process.wait(timeout=20) == 0
    assert re.fullmatch(allowed, process.stderr.read())


@SIGNALS
def test_a_signal_while_it_imports_ends_it_without_a_word(number, tmp_path):
    (tmp_path / "uvloop.py").write_text(WAITS_FOR_EVER)
    with running(with_plain_kernels(PYTHONPATH=str(tmp_path))) as process:
        lines_until(process, "importing")
        require_quiet_end(process, number)


@pytest.mark.slow
@SIGNALS
async def test_a_signal_while_it_compiles_ends_it_without_a_word(number, tmp_path):
    with running({**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}) as process:
        await until(lambda: any(tmp_path.rglob("*.nbi")), "the first of the kernels is compiled")
        require_quiet_end(process, number, allowed=r"(.* compiling kernels: .*\n)?")
