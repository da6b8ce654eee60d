"""A file of settings: what it says, what it refuses, and what goes before it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplug.errors import ConfigError
from kvplug.router.config import RouterConfig
from kvplug.server.cli import parse
from kvplug.server.cluster_config import ClusterConfig
from kvplug.server.config import ServerConfig, TokenizerFolder, WorkerSpec
from kvplug.server.settings_file import read_settings, written

FILE = """\
workers:
  - http://10.0.0.7:8000,events=tcp://10.0.0.7:5557
  - url: http://10.0.0.8:8000
    block_size: 32
port: 8001
grace_s: 3
log_level: debug
router:
  router-mode: round-robin
  temperature: 0.5
  use_kv_events: false
"""


@pytest.fixture
def config_of(tmp_path):
    """The file with this text, flags and variables: the configuration and the log level."""

    def read(text, *argv, **environ):
        path = tmp_path / "kvplug.yaml"
        path.write_text(text)
        return parse(["--config", str(path), *argv], environ)

    return read


def test_a_file_says_what_flags_say(config_of, tmp_path):
    (tmp_path / "tokenizer").mkdir()
    folder = tmp_path / "tokenizer"
    config, log_level = config_of(f"{FILE}tokenizers: ['org/m={folder}', {{folder: {folder}}}]\n")
    assert config == ServerConfig(
        workers=(
            WorkerSpec(url="http://10.0.0.7:8000", events="tcp://10.0.0.7:5557"),
            WorkerSpec(url="http://10.0.0.8:8000", block_size=32),
        ),
        port=8001,
        grace_s=3.0,
        tokenizers=(TokenizerFolder(folder, "org/m"), TokenizerFolder(folder)),
        router=RouterConfig(mode="round_robin", temperature=0.5, use_kv_events=False),
    )
    assert log_level == "debug"
    assert config.tokenizer_folders == {"org/m": folder, "": folder}


def test_a_flag_goes_before_a_variable_and_that_before_the_file(config_of):
    config, log_level = config_of(
        FILE,
        *("--port", "8003", "--worker", "http://a"),
        KVPLUG_PORT="8002",
        KVPLUG_GRACE_S="4",
        KVPLUG_WORKER="http://b",
        KVPLUG_NO_KV_EVENTS="0",
        KVPLUG_LOG_LEVEL="error",
    )
    assert (config.port, config.grace_s, config.workers[0].url) == (8003, 4.0, "http://a")
    assert (config.router.use_kv_events, config.router.temperature) == (True, 0.5)
    assert log_level == "error"


def test_the_file_may_be_named_by_a_variable(tmp_path):
    path = tmp_path / "kvplug.yaml"
    path.write_text(FILE)
    assert parse([], {"KVPLUG_CONFIG": str(path)})[0].port == 8001


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("prot: 1", "1: unknown key 'prot'; did you mean `port`?"),
        ("\nmode: kv", "2: unknown key 'mode'; it belongs under `router`"),
        ("zzzzzz: 1", "1: unknown key 'zzzzzz'; known are "),
        ("port: 1\nport: 2", "2: port is given twice; line 1 has it already"),
        ("router:\n  mode: kv\n  router_mode: kv", "3: mode is given twice; line 2"),
        ("port: '8000'", "1: port: expected a whole number, got '8000'"),
        ("port: true", "1: port: expected a whole number, got True"),
        ("port: null", "1: port: expected a whole number, got None"),
        ("grace_s: soon", "1: grace_s: expected a number, got 'soon'"),
        ("router: {use_kv_events: 1}", "1: use_kv_events: expected true or false, got 1"),
        ("router: {mode: best}", "1: mode: expected one of kv, random"),
        ("router: [kv]", "1: expected a mapping"),
        ("- port", "1: expected a mapping"),
        ("workers: http://a", "1: workers: expected a list"),
        ("workers:\n- http://a\n- ftp://b", "3: worker 'ftp://b': 'ftp://b' is no http URL"),
        ("workers:\n- {ulr: http://a}", "2: unknown key 'ulr'; did you mean `url`?"),
        ("workers:\n- {topic: kv}", "2: a worker needs a url"),
        ("workers:\n- {url: ftp://a}", "2: worker 'ftp://a'"),
        (
            "workers:\n- {url: http://a, block_size: 0}",
            "2: worker 'http://a,block_size=0': block_size='0'",
        ),
        ("log_level: loud", "1: log_level: expected one of debug"),
        ("port: 8000\ngrace_s: [", "2: expected YAML"),
        ("port: !!python/object:os.system 1", "1: expected YAML"),
        ("a: &a [*a]", "1: unknown key 'a'"),
        ("[" * 10_000, "expected YAML"),
        # What is wrong with values that have the right type, or with several of them.
        ("workers: [http://a]\n\nport: 70000", "3: port must be in [0, 65535], got 70000"),
        (
            "workers: [http://a]\nrouter:\n  cost: ms\n  kv_overlap_score_weight: 2",
            "4: overlap_score_weight is a weight of the cost in blocks",
        ),
        ("workers: [http://a]\ntokenizers: [/nowhere]", "2: tokenizers: expected a folder"),
        ("workers: [http://a, http://a]", "1: worker 'http://a' is named twice"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(config_of, capsys, text, sentence):
    with pytest.raises(SystemExit) as exited:
        config_of(text)
    assert exited.value.code == 2
    assert f"kvplug.yaml:{sentence}" in capsys.readouterr().err.replace("yaml: e", "yaml:e")


@pytest.mark.parametrize("text", [b"\xff\xfe\x00", b"port: \x00"])
def test_what_is_no_text_is_refused(tmp_path, text):
    path = tmp_path / "kvplug.yaml"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match="expected YAML"):
        read_settings(path)


def test_a_file_that_is_not_there_is_named(capsys):
    with pytest.raises(SystemExit):
        parse(["--config", "/nowhere/kvplug.yaml"])
    assert "cannot read '/nowhere/kvplug.yaml': No such file" in capsys.readouterr().err


def test_an_empty_file_says_nothing(config_of):
    config, _ = config_of("# nothing\n", "--worker", "http://a")
    assert config == ServerConfig(workers=(WorkerSpec(url="http://a"),))


@given(
    st.builds(
        ServerConfig,
        workers=st.lists(
            st.builds(
                WorkerSpec,
                url=st.integers(1, 65535).map("http://10.0.0.7:{}".format),
                block_size=st.none() | st.integers(1, 64),
            ),
            min_size=1,
            max_size=3,
            unique_by=lambda spec: spec.name,
        ).map(tuple),
        port=st.integers(0, 65535),
        grace_s=st.floats(0.5, 1e6),
        router=st.builds(
            RouterConfig,
            mode=st.sampled_from(["kv", "random"]),
            use_kv_events=st.booleans(),
            temperature=st.floats(0, 10),
        ),
        cluster=st.just(ClusterConfig())
        | st.builds(
            ClusterConfig,
            nats=st.just("embedded"),
            nats_store=st.none() | st.just(Path("/srv/nats")),
            nats_replicas=st.sampled_from([1, 3]),
            router_id=st.none() | st.just("a"),
            router_replica_sync=st.just(True),
        ),
    )
)
def test_what_is_printed_can_be_read_again(tmp_path_factory, config):
    path = tmp_path_factory.mktemp("config") / "kvplug.yaml"
    path.write_text(written(config, "info"))
    assert parse(["--config", str(path)])[0] == config


def test_a_configuration_can_be_checked_without_a_start(tmp_path):
    path = tmp_path / "kvplug.yaml"
    path.write_text("workers: ['http://10.0.0.7:8000']\n")
    command = [sys.executable, "-m", "kvplug.router", "--check-config", "--config", str(path)]
    done = subprocess.run([*command, "--port", "9"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "port: 9" in done.stdout
    path.write_text("prot: 1\n")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "kvplug.yaml:1: unknown key 'prot'" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["router", "--version"], 0), (["doctor", "--help"], 0), (["--help"], 0), ([], 2), (["x"], 2)],
)
def test_the_script_does_what_the_modules_do(arguments, code):
    script = os.path.join(os.path.dirname(sys.executable), "kvplug")
    done = subprocess.run([script, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert "kvplug" in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("flags", "field", "value"),
    [
        (["--router-mode", "round-robin"], "mode", "round_robin"),
        (["--router-kv-overlap-score-weight", "2"], "overlap_score_weight", 2.0),
        (["--no-router-kv-events"], "use_kv_events", False),
        (["--kv-cache-block-size", "32"], "block_size", 32),
        (["--router-ttl-secs", "60"], "approximate_ttl_s", 60.0),
    ],
)
def test_dynamos_spelling_is_understood(flags, field, value):
    config, _ = parse(["--worker", "http://a", *flags])
    assert getattr(config.router, field) == value
