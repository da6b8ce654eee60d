"""`make bench-engine`: what publishing KV events costs vLLM's scheduler and SGLang's, beside their
own publishers.

usage: python -m tests.benchmarks.engine

Each part runs in its engine's environment, made if need be, and prints a table, and last a line of
JSON: {metric: {"value", ...}}. All of them go into bench-results/engine.json.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from examples.launch.engine_env import ensure_tiny_model, ensure_vllm
from examples.launch.sglang_env import ensure_sglang

ROOT = Path(__file__).parents[2]
# (metric, field, limit, whether the figure must not be above it)
TARGETS = (
    ("vllm_added_us", "value", 0.5, True),
    ("vllm_added_us", "ratio", 8.0, False),
    ("sglang_insert_drain", "ratio", 8.0, False),
    ("sglang_rust_added_us", "value", 0.1, True),
)


def parts():
    vllm, sglang = ensure_vllm(), ensure_sglang()
    model = str(ensure_tiny_model(vllm))
    return (
        [str(vllm), "-m", "tests.benchmarks.engine_vllm", model],
        [str(sglang), "-m", "tests.benchmarks.engine_sglang"],
    )


def run(command, scratch):
    """What a part measured; its output goes to ours as well."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": scratch}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=pipe, text=True) as process:
        lines = []
        for line in process.stdout:
            lines.append(line)
            sys.stdout.write(line)
            sys.stdout.flush()
    if process.returncode:
        raise SystemExit(f"{' '.join(command[1:3])} ended with {process.returncode}")
    return json.loads(lines[-1])


def verdicts(results):
    for metric, field, limit, is_most in TARGETS:
        figure = results[metric][field]
        is_met = figure <= limit if is_most else figure >= limit
        sign, verdict = "<=" if is_most else ">=", "met" if is_met else "MISSED"
        yield f"{metric}.{field}: {figure:g} (target {sign} {limit:g}) {verdict}"


def main():
    results = {}
    with tempfile.TemporaryDirectory(prefix="kvplug-bench-") as scratch:
        for command in parts():
            results |= run(command, scratch)
    folder = ROOT / "bench-results"
    folder.mkdir(exist_ok=True)
    (folder / "engine.json").write_text(json.dumps(results, indent=2) + "\n")
    sys.stdout.write("\n".join(verdicts(results)) + "\n")


if __name__ == "__main__":
    main()
