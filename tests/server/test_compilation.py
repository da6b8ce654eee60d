"""Half a minute of silence at the first start would look like a router that hangs."""

import threading
import time

import pytest

from kvplug.server.compilation import compile_kernels


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
