"""Runs a benchmark in vLLM's environment, with the tiny model; makes both if need be.

usage: python -m tests.benchmarks.run_in_vllm MODULE [ARGUMENTS]
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from examples.launch.engine_env import ensure_tiny_model, ensure_vllm

ROOT = Path(__file__).parents[2]


def main(module, *arguments):
    python = ensure_vllm()
    command = [python, "-m", module, ensure_tiny_model(python), *arguments]
    with tempfile.TemporaryDirectory(prefix="kvplug-bench-") as scratch:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": scratch}
        return subprocess.call(command, cwd=ROOT, env=environment)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
