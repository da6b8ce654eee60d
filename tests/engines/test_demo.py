"""`python -m examples.demo` as a user runs it: its table, and that nothing is left behind."""

import os
import re
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from tests.waiting import until

ROOT = Path(__file__).parents[2]
PLOT = ROOT / "bench-results" / "demo.png"
LIMIT_S = 600


class Demo:
    """The demo in a process, with a mark in its environment that all its children inherit."""

    def __init__(self, kind, *flags):
        self.mark = f"KVPLUG_TEST_MARK={uuid.uuid4().hex}".encode()
        name, _, value = self.mark.decode().partition("=")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "examples.demo", "--engine", kind, *flags],
            cwd=ROOT,
            env={**os.environ, name: value, "COLUMNS": "120"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def processes(self):
        """Command lines of all living processes that carry the mark."""
        return [c for path in Path("/proc").glob("[0-9]*") if (c := self._command(path))]

    def _command(self, path):
        try:
            marked = self.mark in (path / "environ").read_bytes().split(b"\0")
            return (path / "cmdline").read_bytes().replace(b"\0", b" ").decode() if marked else ""
        except (OSError, ProcessLookupError):
            return ""  # it ended while we looked


@pytest.fixture
def make_demo(tiny_model):
    demos = []

    def make(*flags):
        demos.append(Demo(*flags))
        return demos[-1]

    yield make
    for demo in demos:
        demo.process.kill()
        demo.process.communicate()


@pytest.mark.parametrize("kind", ["sim", "vllm"])
async def test_kv_finds_more_in_the_caches_than_round_robin(make_demo, kind):
    PLOT.unlink(missing_ok=True)
    demo = make_demo(kind)
    out, err = demo.process.communicate(timeout=LIMIT_S)
    assert demo.process.returncode == 0, err
    shares = {
        policy: float(re.search(rf"{policy}\D+\d+\D+(\d+)\D+([\d.]+)%", out)[2])
        for policy in ("round_robin", "kv ")
    }
    assert shares["kv "] > 1.15 * shares["round_robin"]
    assert demo.processes() == []
    assert PLOT.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
async def test_a_signal_ends_everything_that_the_demo_started(make_demo, number, code):
    demo = make_demo("vllm")
    await until(
        lambda: any("vllm.entrypoints" in c for c in demo.processes()), "engines run", timeout_s=60
    )
    demo.process.send_signal(number)
    _, err = demo.process.communicate(timeout=60)
    assert demo.process.returncode == code
    assert "Traceback" not in err
    await until(lambda: demo.processes() == [], "all processes are gone")
