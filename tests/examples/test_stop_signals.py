"""SIGTERM ends the demo even if Python drops the first exception."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# What a callback of a weak reference raises is printed and dropped.
DROPPED = """
import os, signal, sys, weakref
from examples.demo.stop_signals import StopSignals

class Module:
    pass

def on_gone(_):
    os.kill(os.getpid(), signal.SIGTERM)
    [None for _ in range(1000)]

signals, module = StopSignals(), Module()
signals.listen()
gone = weakref.ref(module, on_gone)
try:
    del module
    print("dropped", flush=True)
    while True:
        signal.pause()
except KeyboardInterrupt:
    signals.ignore()
    sys.exit(signals.exit_code)
"""


@pytest.mark.slow
def test_a_signal_that_python_drops_comes_again():
    command = [sys.executable, "-c", DROPPED]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.stdout == "dropped\n"
    assert ended.returncode == 143
