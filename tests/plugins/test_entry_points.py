"""What loading the plug-in does to a process: nothing that an engine could trip over."""

import importlib
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GROUPS = {"vllm": "vllm.general_plugins", "sglang": "sglang.srt.plugins"}
PROGRAM = """
import importlib, json, sys, threading
import kvplug.engine_plugins
register = getattr(kvplug.engine_plugins, "register_in_" + sys.argv[1])
register()
register()
from kvplug.engines.event_stream import EventStream
json.dump({"threads": threading.active_count(), "modules": sorted(sys.modules)}, sys.stdout)
"""


pytestmark = pytest.mark.parametrize("engine", GROUPS)


def run(engine, **variables):
    command, env = [sys.executable, "-c", PROGRAM, engine], os.environ | variables
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, env=env)


def test_the_entry_point_is_there(engine):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"][GROUPS[engine]]["kvplug"].partition(":")
    assert callable(getattr(importlib.import_module(module), name))


@pytest.mark.parametrize("variables", [{}, {"KVPLUG_BALANCE": "kv"}])
def test_register_starts_no_thread_and_loads_no_numba(engine, variables):
    seen = json.loads(run(engine, **variables).stdout)
    assert seen["threads"] == 1
    assert not set(seen["modules"]) & {"numba", "llvmlite", "asyncio.events"}


def test_register_where_it_cannot_work_says_so_and_does_not_raise(engine):
    line = "goes on without the publisher 'kvplug': No module named"
    assert line in run(engine).stderr


def test_an_unknown_way_to_balance_is_named(engine):
    line = "KVPLUG_BALANCE: expected kv or nothing, got 'least'"
    assert line in run(engine, KVPLUG_BALANCE="least").stderr


@pytest.mark.slow
def test_the_balancing_is_imported_only_if_it_is_wanted(engine):
    name = f"kvplug.dp_balancing.{engine}"
    assert name not in json.loads(run(engine).stdout)["modules"]
    assert name in json.loads(run(engine, KVPLUG_BALANCE="kv").stdout)["modules"]
