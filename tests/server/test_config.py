from pathlib import Path
from typing import get_args

import pytest

from kvplug.errors import ConfigError
from kvplug.router.config import Mode, RouterConfig
from kvplug.server.cli import parse
from kvplug.server.config import ServerConfig, WorkerSpec
from kvplug.transports import TRANSPORTS
from kvplug.transports.memory import MemoryTransport

WORKER = "http://127.0.0.1:8100,events=tcp://127.0.0.1:5557"


def test_a_worker_is_read_with_its_settings():
    assert WorkerSpec.parse(f"{WORKER},topic=kv@") == WorkerSpec(
        url="http://127.0.0.1:8100", events="tcp://127.0.0.1:5557", topic="kv@"
    )
    assert WorkerSpec.parse(f"{WORKER},block_size=32").block_size == 32
    assert WorkerSpec.parse("https://host/base/").url == "https://host/base"
    assert WorkerSpec.parse("unix:/run/e.sock,dp_size=2").name == "unix:/run/e.sock"


def test_a_worker_may_be_named_by_its_event_endpoint_alone():
    spec = WorkerSpec.parse("tcp://127.0.0.1:5557,dp_size=2")
    assert spec == WorkerSpec(events="tcp://127.0.0.1:5557", dp_size=2)
    assert spec.name == "tcp://127.0.0.1:5557"
    assert WorkerSpec.parse("ipc:///run/events").name == "ipc:///run/events"
    assert WorkerSpec.parse(WORKER).name == "http://127.0.0.1:8100"


def test_a_worker_has_an_address():
    with pytest.raises(ConfigError, match="needs a url or an events endpoint"):
        WorkerSpec(topic="kv@a")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "localhost:8100",
        "ftp://host",
        "http://",
        "http://host:99999",
        "http://host/a b",
        "http://host/\r\nx: y",
        "http://host,tcp://127.0.0.1:5557",
        "http://host,event=tcp://127.0.0.1:5557",
        "http://host,events=5557",
        "http://host,events=tcp://a:1,events=tcp://b:2",
        "tcp://a:1,events=tcp://b:2",
        "inproc://events",
        "unix:relative",
        "unix:/" + 107 * "x",
    ],
)
def test_a_malformed_worker_is_rejected_with_the_form(text):
    with pytest.raises(ConfigError, match="expected ADDRESS") as rejected:
        WorkerSpec.parse(text)
    assert f"worker {text!r}" in str(rejected.value)


@pytest.mark.parametrize(
    "text",
    [
        "http://me:secret@host:8100",
        "http://secret@host",
        "http://me:secret@host:bad,events=tcp://a:1",
        "https://me:se/secret@host",
        "http://me:se,secret@host",
        "me:secret@host:8100",
    ],
)
def test_a_password_in_a_url_is_refused_and_not_repeated(text):
    with pytest.raises(ConfigError, match="--worker-api-key-file") as rejected:
        WorkerSpec.parse(text)
    assert "secret" not in str(rejected.value)


def test_an_at_sign_elsewhere_is_no_password():
    assert WorkerSpec.parse("http://host/@a,topic=kv@b").url == "http://host/@a"


def test_a_replay_endpoint_of_another_transport_is_rejected(monkeypatch):
    monkeypatch.setitem(TRANSPORTS, "memory", MemoryTransport)
    text = "http://host,events=memory://engine,replay=tcp://127.0.0.1:6557"
    with pytest.raises(ConfigError, match="expected endpoints of one transport") as rejected:
        WorkerSpec.parse(text)
    assert f"worker {text!r}" in str(rejected.value)
    one = WorkerSpec.parse("http://host,events=tcp://127.0.0.1:5557,replay=ipc:///run/replay")
    assert one.replay == "ipc:///run/replay"


@pytest.mark.parametrize("size", ["0", "x", "-1", "1.5", "65537", ""])
def test_a_block_size_that_is_none_is_rejected(size):
    with pytest.raises(ConfigError, match=f"block_size='{size}'; expected a whole number in"):
        WorkerSpec.parse(f"http://host,block_size={size}")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"workers": ()}, "name at least one with --worker"),
        ({"workers": (WorkerSpec(url="http://a"),) * 2}, "'http://a' is named twice"),
        (
            {"workers": [WorkerSpec(url=u, replay="tcp://c:1") for u in ("http://a", "http://b")]},
            "'http://a' and 'http://b' have the same replay=tcp://c:1; expected an endpoint of its",
        ),
        (
            {"workers": [WorkerSpec(url=u, events="tcp://c:1") for u in ("http://a", "http://b")]},
            "'http://a' and 'http://b' have the same events=tcp://c:1",
        ),
        ({"port": 70_000}, "port must be in"),
        ({"events_bind": "5557"}, "events_bind: expected an endpoint like"),
        (
            {"events_bind": "tcp://*:5557", "workers": (WorkerSpec(url="http://a", topic="kv"),)},
            "expected a topic like kv@POD or kv@POD@MODEL, got 'kv'",
        ),
        ({"max_body_bytes": 0}, "max_body_bytes must be above 0"),
        ({"grace_s": 0}, "grace_s must be above 0"),
        ({"health_interval_s": -1}, "health_interval_s must be above 0"),
        ({"worker_api_key_file": Path("/nowhere")}, "worker_api_key_file: cannot be read: "),
        ({"events_key_file": Path("/nowhere")}, "events_server_key: expected both"),
        ({"events_server_key": Path("/nowhere")}, "events_server_key: expected both"),
        (
            {"events_key_file": Path("/nowhere"), "events_server_key": Path("/nowhere")},
            "cannot use the key file /nowhere: expected a certificate",
        ),
        (
            {
                "events_key_file": Path("/nowhere"),
                "events_server_key": Path("/nowhere"),
                "events_bind": "tcp://*:5557",
            },
            "events_bind: expected none with events_key_file",
        ),
        (
            {
                "workers": [
                    WorkerSpec(events="tcp://c:1"),
                    WorkerSpec(url="http://a", events="tcp://c:1"),
                ]
            },
            "'tcp://c:1' and 'http://a' have the same events=tcp://c:1",
        ),
        (
            {
                "workers": [WorkerSpec(events="tcp://c:1")],
                "router": RouterConfig(use_kv_events=False),
            },
            "worker 'tcp://c:1': expected the URL of its API, as this router follows no events",
        ),
    ],
)
def test_a_wrong_setting_is_named(settings, sentence):
    with pytest.raises(ConfigError, match=sentence):
        ServerConfig(**{"workers": (WorkerSpec(url="http://a"),), **settings})


@pytest.mark.parametrize("content", ["", " \n", "kéy", "two\nlines"])
def test_a_file_without_a_key_is_rejected_and_not_shown(content, tmp_path):
    path = tmp_path / "key"
    path.write_text(content)
    with pytest.raises(ConfigError, match="expected a line of printable ASCII") as raised:
        ServerConfig(workers=(WorkerSpec(url="http://a"),), worker_api_key_file=path)
    assert "kéy" not in str(raised.value)


def test_the_command_line_becomes_the_configuration():
    config, log_level = parse(
        ["--worker", WORKER, "--router-mode", "round_robin", "--block-size", "32", "--port", "0"]
    )
    assert (config.router.mode, config.router.block_size, config.port) == ("round_robin", 32, 0)
    assert (config.host, log_level) == ("127.0.0.1", "info")
    assert config.events_bind is None
    assert parse(["--worker", WORKER])[0].router.block_size is None


NO_NUMBERS = ["x", "", "nan", "1.5", "1e9", str(2**63), "9" * 5000]
BAD_NUMBERS = [
    *((["--max-index-blocks", number], "below 2**63, got") for number in NO_NUMBERS),
    *((["--max-index-bytes", number], "below 2**63, got") for number in NO_NUMBERS),
    (["--max-index-blocks", "0"], "max_blocks of an index must be at least 1, got 0"),
    (["--max-index-blocks", "-5"], "max_blocks of an index must be at least 1, got -5"),
    (["--max-index-bytes", "262143"], "max_bytes of an index must be at least 262144, got 262143"),
    (["--max-index-bytes", "-1"], "max_bytes of an index must be at least 262144, got -1"),
    (["--approximate-ttl-s", "x"], "invalid float value: 'x'"),
    (["--approximate-ttl-s", ""], "invalid float value: ''"),
    (["--approximate-ttl-s", "0"], "approximate_ttl_s must be a finite number above 0, got 0.0"),
    (["--approximate-ttl-s", "-1"], "approximate_ttl_s must be a finite number above 0, got -1.0"),
    (["--approximate-ttl-s", "nan"], "approximate_ttl_s must be a finite number above 0, got nan"),
    (["--approximate-ttl-s=-inf"], "approximate_ttl_s must be a finite number above 0, got -inf"),
]


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--wat"], "unrecognized arguments: --wat"),
        ([], "no workers: name at least one"),
        (["--worker", "nonsense"], "is no http URL"),
        (["--worker", WORKER, "--block-size", "0"], "block_size must be in"),
        (["--worker", WORKER, "--block-size", "x"], "invalid int value"),
        (["--worker", WORKER, "--mode", "magic"], "invalid choice: 'magic'"),
        (["--worker", WORKER, "--tokenizer", "/nowhere"], "expected a folder"),
        (["--worker", WORKER, "--block", "16"], "unrecognized arguments"),
        *((["--worker", WORKER, *argv], sentence) for argv, sentence in BAD_NUMBERS),
    ],
)
def test_bad_arguments_end_with_code_2_and_one_sentence(argv, sentence, capsys):
    with pytest.raises(SystemExit) as left:
        parse(argv)
    assert left.value.code == 2
    *_, said = capsys.readouterr().err.splitlines()
    assert said.startswith("python -m kvplug.router: error: ")
    assert sentence in said


def test_bounds_and_times_may_be_large():
    most = str(2**63 - 1)
    bounds = ["--max-index-blocks", most, "--max-index-bytes", most]
    config, _ = parse(["--worker", WORKER, *bounds, "--approximate-ttl-s", "1e300"])
    assert (config.router.max_index_blocks, config.router.max_index_bytes) == (2**63 - 1,) * 2
    assert config.router.approximate_ttl_s == 1e300


ENVIRON = {
    "KVPLUG_WORKER": f"{WORKER} http://127.0.0.1:8200",
    "KVPLUG_PORT": "9000",
    "KVPLUG_NO_KV_EVENTS": "1",
    "KVPLUG_STALE_CONFIDENCE": "0.25",
    "KVPLUG_LOG_LEVEL": "DEBUG",
}


def test_each_flag_has_a_variable():
    config, log_level = parse([], ENVIRON)
    assert [worker.url for worker in config.workers] == [
        "http://127.0.0.1:8100",
        "http://127.0.0.1:8200",
    ]
    assert (config.port, log_level) == (9000, "debug")
    assert (config.router.use_kv_events, config.router.stale_confidence) == (False, 0.25)


def test_a_flag_outweighs_its_variable():
    config, _ = parse(["--worker", "http://127.0.0.1:8300", "--port", "1"], ENVIRON)
    assert [worker.url for worker in config.workers] == ["http://127.0.0.1:8300"]
    assert config.port == 1


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        ({"KVPLUG_PORT": "x"}, "--port/--http-port: invalid int value: 'x'"),
        ({"KVPLUG_ROUTER_MODE": "magic"}, f"one of {', '.join(get_args(Mode))}; got 'magic'"),
        ({"KVPLUG_NO_KV_EVENTS": "maybe"}, "KVPLUG_NO_KV_EVENTS: expected 1 or 0, got 'maybe'"),
        ({"KVPLUG_WORKER": "nonsense"}, "is no http URL"),
        ({"KVPLUG_STALE_CONFIDENCE": "2"}, "stale_confidence must be a number in [0, 1], got 2.0"),
        ({"KVPLUG_LOG_LEVEL": "loud"}, "--log-level: must be one of debug, info, warning, error"),
    ],
)
def test_a_wrong_variable_ends_with_code_2_and_one_sentence(environ, sentence, capsys):
    with pytest.raises(SystemExit) as left:
        parse([], ENVIRON | environ)
    assert left.value.code == 2
    assert sentence in capsys.readouterr().err.splitlines()[-1]


def cluster(*flags):
    return parse(["--worker", "http://127.0.0.1:8100", *flags])[0].cluster


def test_nats_servers_are_read_with_what_belongs_to_them(tmp_path):
    config = cluster("--nats", "nats://a:4222, tls://b:4222", "--nats-fleet", "f")
    settings = config.settings_at(config.servers)
    assert (settings.servers, settings.fleet) == (("nats://a:4222", "tls://b:4222"), "f")
    embedded = cluster("--nats", "embedded", "--nats-store", str(tmp_path))
    assert embedded.is_embedded
    assert embedded.store == tmp_path
    assert cluster().nats is None


def test_a_router_has_the_same_id_at_each_start():
    assert cluster().id_at(8000) == cluster().id_at(8000) != cluster().id_at(8001)
    assert cluster("--nats", "embedded", "--router-id", "east-1").id_at(8000) == "east-1"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--router-reset-states"], "router_reset_states: expected nats with it"),
        (["--nats", "embedded", "--nats-nkey-file", "/k"], "nats_nkey_file: not with nats="),
        (["--nats", "nats://a:1", "--nats-port", "1"], "nats_port: not with nats="),
        (["--nats", "nats://u:p@a:1"], "may not name a user or a password"),
        (["--nats", "a:4222"], "is no NATS URL: expected one like"),
        (["--nats", ","], "no NATS server is named"),
        (["--nats", "embedded", "--nats-fleet", "a.b"], "a fleet's name has 1 to 64 letters"),
        (["--nats", "embedded", "--nats-replicas", "2"], "nats_replicas must be 1, 3 or 5"),
        (["--nats", "embedded", "--router-id", "a.b"], "router_id must be 1 to 64 letters"),
        (["--nats", "embedded", "--no-kv-events"], "nats: expected a router that follows events"),
        (
            ["--nats", "embedded", "--no-kv-events", "--router-reset-states"],
            "router_reset_states: expected a router that follows events",
        ),
        (["--nats", "embedded", "--events-bind", "tcp://*:1"], "events_bind: expected none"),
        (
            ["--nats", "embedded", "--router-replica-sync", "--processes", "2"],
            "processes: expected 1 with router_replica_sync",
        ),
        (["--worker", "http://a,events=nats"], "has events=nats: expected nats"),
        (["--worker", "http://a,events=nats,replay=tcp://b:1"], "which needs none"),
    ],
)
def test_contradictions_about_nats_are_refused(capsys, flags, message):
    with pytest.raises(SystemExit):
        cluster(*flags)
    assert message in capsys.readouterr().err


def test_without_events_routers_may_still_share_their_load():
    assert cluster("--nats", "embedded", "--no-kv-events", "--router-replica-sync").nats
