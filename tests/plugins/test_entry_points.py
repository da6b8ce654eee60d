"""What loading the plug-in does to a process: nothing that an engine could trip over."""

import importlib
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GROUPS = {"vllm": "vllm.general_plugins", "sglang": "sglang.srt.plugins"}
PROGRAM = """
import importlib, json, sys, threading
plug_in = importlib.import_module("kvplug.engines." + sys.argv[1])
plug_in.register()
plug_in.register()
from kvplug.engines.event_stream import EventStream
json.dump({"threads": threading.active_count(), "modules": sorted(sys.modules)}, sys.stdout)
"""


pytestmark = pytest.mark.parametrize("engine", GROUPS)


def run(engine):
    command = [sys.executable, "-c", PROGRAM, engine]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)


def test_the_entry_point_is_there(engine):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"][GROUPS[engine]]["kvplug"].partition(":")
    assert callable(getattr(importlib.import_module(module), name))


def test_register_starts_no_thread_and_loads_no_numba(engine):
    seen = json.loads(run(engine).stdout)
    assert seen["threads"] == 1
    assert not set(seen["modules"]) & {"numba", "llvmlite", "asyncio.events"}


def test_register_where_it_cannot_work_says_so_and_does_not_raise(engine):
    line = "goes on without the publisher 'kvplug': No module named"
    assert line in run(engine).stderr
