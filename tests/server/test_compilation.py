"""Half a minute of silence at the first start would look like a router that hangs."""

import os
import subprocess
import sys
import threading
import time

import pytest

from kvplug import kernels
from kvplug.server import compilation
from kvplug.server.compilation import compile_kernels
from tests.kernels.test_jit import COMPILED


@pytest.fixture
def said(caplog):
    caplog.set_level("INFO", logger="kvplug.server.compilation")
    return caplog.messages


@pytest.fixture
def announced(caplog):
    """Set by the first line in the log."""
    event = threading.Event()
    caplog.handler.addFilter(lambda record: event.set() or True)
    return event


def test_kernels_from_the_cache_are_no_news(said):
    compile_kernels(lambda: None)
    assert said == []


def test_a_long_compilation_is_announced_before_it_ends_and_timed(announced, said, caplog):
    began_s = time.monotonic()
    compile_kernels(lambda: announced.wait(timeout=30), moment_s=0.01)
    took_s = time.monotonic() - began_s
    began, ended = caplog.messages
    assert "compiling kernels: about half a minute the first time" in began
    assert ended in [f"kernels compiled in {seconds} s" for seconds in range(round(took_s) + 1)]


def test_a_failure_is_not_followed_by_an_announcement(said):
    def fail():
        raise OSError("no space left")

    num_threads = threading.active_count()
    with pytest.raises(OSError, match="no space left"):
        compile_kernels(fail)
    assert (threading.active_count(), said) == (num_threads, [])


def test_kernels_that_are_kept_are_counted_with_their_folder(monkeypatch, capsys):
    monkeypatch.setattr(kernels, "compile_all", lambda: ["/cache", "/cache"])
    assert compilation.main([]) == 0
    assert capsys.readouterr().out == "2 kernels are in the cache after 0 s: /cache\n"


@pytest.mark.parametrize("folders", [[], ["/cache", None]])
def test_kernels_that_no_cache_keeps_are_a_failure(monkeypatch, capsys, folders):
    monkeypatch.setattr(kernels, "compile_all", lambda: folders)
    assert compilation.main([]) == 1
    assert "no cache keeps them: NUMBA_CACHE_DIR must name a folder" in capsys.readouterr().err


def test_it_takes_no_arguments(capsys):
    assert compilation.main(["--all"]) == 2
    assert "takes no arguments, got --all" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(not COMPILED, reason="nothing is cached")
def test_the_command_compiles_what_a_router_starts_with():
    command = [sys.executable, "-m", "kvplug.router", "compile"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=280, env=os.environ)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "kernels are in the cache after" in ended.stdout
