"""What loading the plug-in does to a process: nothing that an engine could trip over."""

import importlib
import json
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = """
import json, sys, threading
from kvplug.engines import vllm
vllm.register()
vllm.register()
from kvplug.engines.publisher import Publisher
json.dump({"threads": threading.active_count(), "modules": sorted(sys.modules)}, sys.stdout)
"""


def run():
    return subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=60
    )


def test_the_entry_point_is_there():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["vllm.general_plugins"]["kvplug"].partition(":")
    assert callable(getattr(importlib.import_module(module), name))


def test_register_starts_no_thread_and_loads_no_numba():
    seen = json.loads(run().stdout)
    assert seen["threads"] == 1
    assert not set(seen["modules"]) & {"numba", "llvmlite", "numpy", "asyncio.events"}


def test_register_where_it_cannot_work_says_so_and_does_not_raise():
    assert "kvplug: vLLM goes on without the publisher 'kvplug': No module named" in run().stderr
