"""The package from outside: its names, its version, what importing it costs."""

import doctest
import json
import re
import subprocess
import sys
from pathlib import Path

import kvplug
from tests.plain_kernels import with_plain_kernels

ROOT = Path(__file__).parents[1]


def test_every_public_name_is_there_and_documented():
    assert sorted(kvplug.__all__) == kvplug.__all__
    for name in set(kvplug.__all__) - {"__version__"}:
        assert getattr(kvplug, name).__doc__, name


def test_unknown_names_are_attribute_errors():
    assert not hasattr(kvplug, "nonsense")


def loaded_by(statement):
    program = f"{statement}; import sys, json; json.dump(sorted(sys.modules), sys.stdout)"
    command, environment = [sys.executable, "-c", program], with_plain_kernels()
    run = subprocess.run(command, capture_output=True, check=True, env=environment)
    return {name.partition(".")[0] for name in json.loads(run.stdout)}


def test_importing_kvplug_loads_neither_numba_nor_a_socket():
    assert not loaded_by("import kvplug") & {"numba", "numpy", "zmq", "aiohttp", "asyncio"}


def test_the_in_process_router_needs_no_socket_and_no_http():
    loaded = loaded_by("from kvplug import Router; Router()")
    assert not loaded & {"zmq", "aiohttp", "prometheus_client", "tokenizers"}


def test_the_changelog_begins_with_this_version():
    versions = re.findall(r"^## \[?(\d[^\] ]*)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[0] == kvplug.__version__


def test_the_session_in_the_package_docstring_is_true():
    assert doctest.testmod(kvplug).failed == 0
