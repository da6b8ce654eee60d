"""`python -m kvplug.sim.engine`, mostly as a process."""

import json
import signal
import socket
import subprocess
import sys
import urllib.request
from contextlib import contextmanager

import pytest

from kvplug.sim.engine.__main__ import main
from tests.sim.test_tokenizer import model_folder  # noqa: F401 - a fixture
from tests.test_package import loaded_by

COMMAND = [sys.executable, "-m", "kvplug.sim.engine"]


@contextmanager
def started(*flags):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*COMMAND, *flags], **pipes) as process:
        try:
            yield process, json.loads(process.stdout.readline())
        finally:
            process.kill()


@pytest.fixture
def ran(monkeypatch, capfd):
    """(exit code, what it said on standard error), in this process: it ends before it serves."""

    def run(*flags):
        monkeypatch.setattr(sys, "argv", [*COMMAND[2:], *flags])
        try:
            code = main()
        except SystemExit as left:
            code = left.code
        return code, capfd.readouterr().err

    return run


def complete(url, prompt):
    body = json.dumps({"prompt": prompt, "max_tokens": 4}).encode()
    with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/completions", body)) as reply:
        return json.load(reply)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_says_where_it_listens_answers_and_stops_on_a_signal(number):
    with started("--replay-endpoint", "tcp://127.0.0.1:0") as (process, addresses):
        assert addresses["events"].startswith("tcp://127.0.0.1:")
        assert addresses["replay"].startswith("tcp://127.0.0.1:")
        assert len(complete(addresses["url"], "Hello")["choices"][0]["text"]) == 4
        process.send_signal(number)
        assert process.wait(timeout=10) == 0
        assert process.stderr.read() == ""


def test_with_a_tokenizer(model_folder):  # noqa: F811 - it is the fixture
    with started("--tokenizer", str(model_folder)) as (_, addresses):
        assert complete(addresses["url"], "the quick fox")["usage"]["prompt_tokens"] == 3
        with urllib.request.urlopen(addresses["url"] + "/v1/models") as reply:
            assert json.load(reply)["data"][0]["root"] == str(model_folder)


def test_a_taken_port_ends_it_with_one_sentence(ran):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, said = ran("--port", str(port))
    assert code == 1
    assert f"cannot listen on 127.0.0.1:{port}: " in said
    assert said.count("\n") == 1


def test_bad_flags_end_it_with_code_2(ran):
    code, said = ran("--no-such-flag")
    assert code == 2
    assert "unrecognized arguments: --no-such-flag" in said


def test_nothing_that_it_loads_is_numba_even_with_a_tokenizer():
    loaded = loaded_by(
        "import kvplug.sim.engine_config, kvplug.sim.engine_service, kvplug.sim.tokenizer;"
        "import kvplug.tokenization.prompt_tokenizer"
    )
    assert "aiohttp" in loaded
    assert "numba" not in loaded
