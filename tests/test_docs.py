"""The documentation says what is true: its code runs, its flags, links and metrics exist."""

import functools
import importlib
import json
import re
import shlex
import subprocess
import sys
import tomllib
from itertools import dropwhile
from pathlib import Path
from typing import get_args
from urllib.parse import urlsplit

import pytest

from examples import nats_permissions
from kvplug.codec import Reason
from kvplug.curve_keys import ServerKeys
from kvplug.engine_plugins import BALANCE
from kvplug.engines import nats_target
from kvplug.engines import settings as publisher_settings
from kvplug.engines.settings import PublisherConfig
from kvplug.forwarder import arguments as forwarder_cli
from kvplug.forwarder.config import ForwarderConfig
from kvplug.index.apply_result import RejectReason
from kvplug.ingest.applying import _UNUSABLE
from kvplug.nats.settings import VARIABLES
from kvplug.router.config import Mode, RouterConfig
from kvplug.server.api.endpoints import ENDPOINTS
from kvplug.server.cli import parse
from kvplug.server.cluster_config import ClusterConfig
from kvplug.server.config import ServerConfig
from kvplug.server.diagnosis import doctor
from kvplug.setting import settings_of
from kvplug.sim import engine_config as engine_cli
from kvplug.sim.replay import cli as replay_cli
from kvplug.topics import Topic
from kvplug.transports import TRANSPORTS
from kvplug.wire import TIERS
from tests import settings_tables
from tests.documentation import PAGES, ROOT, anchors, blocks, commands, links, name_of

SETTINGS = (ROOT / "docs" / "settings.md").read_text()
HTTP_API = (ROOT / "docs" / "http-api.md").read_text()
ENGINES = (ROOT / "docs" / "engines.md").read_text()
EVENTS = (ROOT / "docs" / "events.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
OTHER_PROGRAMS = {"nginx", "source", "kill", "umask", "mkdir", "cp"}
OF_PUBLISHERS = {
    value for value in vars(publisher_settings).values() if str(value).startswith("KVPLUG_")
} | {*VARIABLES, nats_target.WORKER, nats_target.STREAM}
KEY_FLAGS = ("--events-key-file", "--events-server-key")
# Flags of programs that are not ours.
OF_ENGINES = {
    *("--api-key", "--block-size", "--enable-force-include-usage", "--enable-prefix-caching"),
    *("--disable-hybrid-kv-cache-manager", "--disable-hybrid-swa-memory", "--system", "--ulimit"),
    *("--enable-prompt-tokens-details", "--kv-events-config", "--model", "--port", "--uds"),
    *("--prefix-caching-hash-algo", "--served-model-name"),
    *("--decode-log-interval", "--disable-radix-cache", "--enable-cache-report", "--model-path"),
    *("--page-size", "--data-parallel-size", "--dp-size", "--api-server-count"),
    *("--data-parallel-external-lb", "--data-parallel-hybrid-lb", "--data-parallel-size-local"),
}
OF_OTHERS = {"--no-cache-dir", "--create-home", "--index-url"}


def pages(found):
    return [pytest.param(*each, id=f"{name_of(each[0])}:{each[1]}") for each in found]


@pytest.mark.parametrize(("page", "number", "code"), pages(blocks("python")))
def test_python_blocks_run(page, number, code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    compiled = compile(code, f"{name_of(page)}, block {number}", "exec")
    if "import LLM" not in code:
        exec(compiled, {})
        return
    # It needs vLLM: of that block the names of kvplug are checked.
    for module in re.findall(r"^import (kvplug[\w.]+)$", code, re.MULTILINE):
        assert hasattr(importlib.import_module(module), "register")


@pytest.mark.parametrize(("page", "number", "code"), pages(blocks("bash")))
def test_bash_blocks_name_what_exists(page, number, code):
    found = list(commands(code))
    assert found
    for words in found:
        check_command(list(dropwhile(is_variable, words)))


def is_variable(word):
    name, equals, _ = word.partition("=")
    return bool(equals) and name in {BALANCE, *OF_PUBLISHERS}


def check_command(words):
    program, *arguments = words
    program = program.removeprefix(".venv/bin/")
    if program == "make":
        check_make(arguments)
    elif program in ("python", "python3"):
        check_python(*arguments)
    elif program == "vllm":
        assert arguments[0] == "serve"
        check_engine(arguments[1:])
    elif program == "pip":
        for extra in re.findall(r"\[(\w+)\]", " ".join(arguments)):
            assert (
                extra
                in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
                    "optional-dependencies"
                ]
            )
    elif program == "curl":
        [url] = [word for word in arguments if word.startswith("http")]
        assert f" {urlsplit(url).path}`" in HTTP_API
    elif program != "echo":
        assert program in OTHER_PROGRAMS, words


def check_make(arguments):
    for word in arguments:
        variable, equals, _ = word.partition("=")
        if equals:
            assert f"$({variable})" in MAKEFILE, word
        else:
            assert f"\n{word}:" in MAKEFILE, word


def check_router(arguments):
    if arguments[:1] == ["doctor"]:
        doctor._parser().parse_args(arguments[1:])
    elif arguments != ["compile"]:
        parse(_without_keys(arguments))


def _without_keys(arguments):
    """Key files are on a user's machine; `test_keys_are_made_as_the_page_says` makes some."""
    files = [at + 1 for at, word in enumerate(arguments) if word in KEY_FLAGS]
    return [word for at, word in enumerate(arguments) if at not in files and word not in KEY_FLAGS]


def test_keys_are_made_as_the_page_says(tmp_path):
    make, allow, use = (code for _, _, code in blocks("bash", [ROOT / "docs" / "security.md"]))
    made = make.replace("python", sys.executable) + allow.replace("/etc", str(tmp_path))
    subprocess.run(["sh", "-ec", made], cwd=tmp_path, check=True)
    [[*_, secret, _, public]] = commands(use)
    values = [str(tmp_path / Path(name).name) for name in (secret, public)]
    flags = [word for pair in zip(KEY_FLAGS, values, strict=True) for word in pair]
    config, _ = parse(["--worker", "http://10.0.0.7:8000", *flags])
    assert config.event_keys is not None
    clients = tmp_path / "kvplug" / "clients"
    assert [each.name for each in clients.iterdir()] == ["router.key"]
    keys = ServerKeys.from_files(tmp_path / "engines.key_secret", clients)
    assert keys.public == config.event_keys.server_public


def check_python(flag, what, *arguments):
    if flag == "-c":
        assert compile(what, "docs", "exec")
    else:
        assert flag == "-m"
        check_module(what, list(arguments))


def check_module(module, arguments):
    if module == "kvplug.router":
        check_router(arguments)
    elif module == "kvplug.sim.engine":
        engine_cli.parse(arguments)
    elif module == "kvplug.sim":
        replay_cli._parser().parse_args(arguments)
    elif module == "kvplug.forwarder":
        forwarder_cli.parse(arguments, {})
    elif module == "sglang.launch_server":
        check_engine(arguments)
    elif module == "tests.chaos":
        assert {word for word in arguments if word.startswith("--")} <= set(of_tests())
    elif module != "venv":
        assert importlib.util.find_spec(module), module


def check_engine(arguments):
    assert {word for word in arguments if word.startswith("--")} <= OF_ENGINES
    if "--kv-events-config" not in arguments:
        assert {"--data-parallel-size", "--dp-size"} & {*arguments}
        return
    config = json.loads(arguments[arguments.index("--kv-events-config") + 1])
    # What the engine itself reads, and does not hand to its publisher.
    for name in ("publisher", "enable_kv_cache_events", "format"):
        config.pop(name, None)
    config.setdefault("endpoint", "tcp://*:5557")  # vLLM's default
    assert PublisherConfig(**config).of_rank(1)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_targets_and_flags_in_the_text_exist(page):
    text = page.read_text()
    for target in re.findall(r"`make ([a-z-]+)", text):
        check_make([target])
    flags = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", text))
    assert flags - all_flags() == set()


@functools.cache
def all_flags():
    parsers = (
        doctor._parser(), engine_cli._parser(), replay_cli._parser(), nats_permissions._parser()
    )  # fmt: skip
    ours = {flag for parser in parsers for flag in parser._option_string_actions}
    return (
        ours
        | {"--log-level", "--config", "--check-config", *of_router(), *of_tests()}
        | OF_ENGINES
        | OF_OTHERS
    )


def of_router():
    for config in (RouterConfig, ServerConfig, ClusterConfig, ForwarderConfig):
        for _, known in settings_of(config):
            yield from known.flags


def aliases():
    configs = (RouterConfig, ServerConfig, ClusterConfig)
    return {flag for each in configs for _, known in settings_of(each) for flag in known.flags[1:]}


def of_tests():
    """Of the programs that `make` runs."""
    for path in [*(ROOT / "tests" / "benchmarks").glob("*.py"), ROOT / "tests/chaos/__main__.py"]:
        yield from re.findall(r'"(--[a-z-]+)"', path.read_text())


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_environment_variables_in_the_text_exist(page):
    known = {
        *settings_tables.variables(),
        "KVPLUG_LOG_LEVEL",
        "KVPLUG_CONFIG",
        "KVPLUG_CACHE",
        BALANCE,
    }
    known |= {"KVPLUG_TEST_EXAMPLES", "KVPLUG_TEST_AWAY_S", *OF_PUBLISHERS}
    assert set(re.findall(r"\bKVPLUG_[A-Z_]*[A-Z]", page.read_text())) <= known


def test_workers_in_deployments_are_understood():
    text = (ROOT / "docs" / "deploying.md").read_text().replace("\\\n", " ")
    systemd = re.search(r'"KVPLUG_WORKER=(.*?)"', text)[1]
    kubernetes = re.search(r"value: >-\n(.*?)\n +ports:", text, re.DOTALL)[1]
    for workers in (systemd, kubernetes):
        config, _ = parse([], {"KVPLUG_WORKER": " ".join(workers.split())})
        assert len(config.workers) == 2
        assert all(worker.events and worker.replay for worker in config.workers)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


def test_every_page_is_in_the_index():
    index = ROOT / "docs" / "README.md"
    listed = {link.partition("#")[0] for link in links(index)}
    assert {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"} <= listed


def test_decisions_that_are_referred_to_exist():
    known = set(re.findall(r"^## (\d+)\. ", (ROOT / "docs" / "decisions.md").read_text(), re.M))
    assert known >= {str(number) for number in range(1, 56)}
    for path in [*PAGES, *(ROOT / "kvplug").rglob("*.py")]:
        text = path.read_text()
        named = re.findall(r"\b[Dd]ecisions? (\d+)(?:(?: to | and |, )(\d+))*", text)
        named += re.findall(r"decisions\.md, (\d+)(?: and (\d+))?", text)
        for numbers in named:
            assert known >= set(filter(None, numbers)), f"{path}: {numbers}"


def test_every_error_code_is_documented():
    codes = set()
    for path in (ROOT / "kvplug" / "server").rglob("*.py"):
        codes |= set(re.findall(r'code="(\w+)"', path.read_text()))
    assert {"worker_lost", "no_worker"} <= codes
    assert codes <= set(re.findall(r"`(\w+)`", HTTP_API))


def test_every_endpoint_is_documented():
    documented = set(re.findall(r"`POST (/[\w/]+)`", HTTP_API))
    assert {endpoint.path for endpoint in ENDPOINTS} <= documented


def test_every_reason_that_leaves_a_worker_exact_is_named():
    [harmless] = re.findall(r"These do not:(.*?)\. Nor do", EVENTS, re.DOTALL)
    named = set(re.findall(r"`(\w+)`", harmless))
    of_index = {reason.value for reason in RejectReason}
    assert named & of_index == of_index - _UNUSABLE - {RejectReason.UNKNOWN_PARENT.value}
    assert not named & {reason.value for reason in Reason}


def test_the_glossary_is_short():
    page = (ROOT / "docs" / "glossary.md").read_text()
    words = re.findall(r"^\| ([a-z ]+) \|", page, re.MULTILINE)
    assert words[0] == "term"
    assert 0 < len(words[1:]) <= 26
    text = "".join(each.read_text().lower() for each in PAGES if each.name != "glossary.md")
    assert all(word in text for word in words[1:])


def test_pictures_are_small():
    for picture in (ROOT / "docs" / "img").iterdir():
        assert picture.stat().st_size <= 200_000


def test_every_setting_is_documented_with_its_default(capsys, monkeypatch):
    assert settings_tables.page(SETTINGS) == SETTINGS, "run `make docs`"
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit):
        parse(["--help"])
    flags = set(re.findall(r"^ +(--[a-z-]+)", capsys.readouterr().out, re.MULTILINE))
    assert flags - {"--version"} == flags_of_group("python -m kvplug.router") - aliases()


def test_every_flag_of_the_doctor_is_documented(capsys):
    with pytest.raises(SystemExit):
        doctor.main(["--help"])
    usage = capsys.readouterr().out.partition("\n\n")[0]
    assert set(re.findall(r"--[a-z][a-z-]+", usage)) == flags_of_group(
        "python -m kvplug.router doctor"
    )


def flags_of_group(title):
    _, _, rest = SETTINGS.partition(f"## {title}\n")
    return set(re.findall(r"`(--[a-z][a-z-]+)", rest.partition("\n## ")[0]))


@pytest.mark.parametrize("config", [RouterConfig, ServerConfig, ClusterConfig])
def test_every_field_is_a_setting_with_a_flag(config):
    known = {field.name for field, _ in settings_of(config)}
    assert config.__dataclass_fields__.keys() - known <= {"router", "cluster"}


def test_the_events_config_of_the_plugins_is_documented_field_by_field():
    documented = re.findall(r"^\| `([a-z_]+)` \| (\S+) \|", ENGINES, re.MULTILINE)
    fields = PublisherConfig.__dataclass_fields__.values()
    assert [name for name, _ in documented] == [field.name for field in fields]
    defaults = dict(documented)
    for name in ("buffer_steps", "hwm", "max_queue_size"):
        assert defaults[name] == str(PublisherConfig.__dataclass_fields__[name].default)


def test_the_events_configs_in_the_documentation_are_understood():
    configs = [
        json.loads(flag)
        for flag in re.findall(r"--kv-events-config '(\{.*?\})'", ENGINES, re.DOTALL)
        if '"endpoint"' in flag  # over NATS there is none
    ]
    # What the engine itself reads, and does not pass on.
    own = [("enable_kv_cache_events", True), ("format", "dynamo")]
    for config, (name, value) in zip(configs, own, strict=True):
        assert (config.pop("publisher"), config.pop(name)) == ("kvplug", value)
        endpoints = PublisherConfig(**config).of_rank(1)
        assert endpoints == ("tcp://127.0.0.1:5558", "tcp://127.0.0.1:6558")


@pytest.mark.parametrize("mode", get_args(Mode))
def test_every_mode_is_explained(mode):
    meanings = {each.name: known.meaning for each, known in settings_of(RouterConfig)}
    assert f"`{mode}`" in meanings["mode"]
    assert f"--router-mode {mode}" in (ROOT / "docs" / "routing.md").read_text()


@pytest.mark.parametrize("scheme", TRANSPORTS)
def test_every_scheme_of_endpoints_is_documented(scheme):
    assert re.search(rf"`EventThread\(.*`{scheme}`", (ROOT / "docs" / "api.md").read_text())
    meanings = {each.name: known.meaning for each, known in settings_of(ServerConfig)}
    assert f"`{scheme}://" in meanings["workers"]
    assert f"`{scheme}://" in EVENTS


@pytest.mark.parametrize("reason", [*Reason, *RejectReason])
def test_every_reason_to_reject_an_event_is_documented(reason):
    assert f"`{reason}`" in EVENTS


def test_every_medium_is_documented():
    assert set(re.findall(r"`(\w+)`", EVENTS[EVENTS.index("### Media") :])) >= set(TIERS)


def test_every_dialect_has_vectors_and_every_vector_a_dialect():
    rows = re.findall(r"^\|.*\| ([\w.-]+) \|$", EVENTS, re.MULTILINE)
    files = {path.stem for path in (ROOT / "tests" / "vectors").glob("*.json")}
    assert set(rows) - {"vectors"} - {"---"} >= files
    assert files >= {row for row in rows if re.match(r"[a-z]+-\d", row)}


def test_the_commands_of_the_page_on_events_are_understood():
    replayed, shared = (
        parse(shlex.split(command.replace("\\\n", " ")))[0]
        for command in re.findall(
            r"^python -m kvplug.router (.*?)\n(?:vllm|```)", EVENTS, re.DOTALL | re.MULTILINE
        )
    )
    assert replayed.workers[0].replay == "tcp://10.0.0.7:6557"
    config = shared
    assert config.events_bind == "tcp://0.0.0.0:5557"
    assert [str(Topic.parse(worker.topic)) for worker in config.workers] == [
        "kv@pod-0@qwen",
        "kv@pod-1@qwen",
    ]


def test_paths_named_in_the_documentation_exist():
    for page in (ROOT / "docs").glob("*.md"):
        for path in re.findall(r"\b(?:tests|kvplug)/[\w/]+\.py", page.read_text()):
            assert (ROOT / path).exists(), f"{page.name}: {path}"


def test_the_router_in_a_program_works_as_shown():
    page = (ROOT / "docs" / "how-it-works.md").read_text()
    code = re.search(r"```python\n(.*?)```", page[page.index("### In a program") :], re.DOTALL)
    names = {}
    exec(code[1], names)
    assert len(names["decisions"]) == 2
    assert len(names["router"].load) == 0


def test_the_settings_file_in_the_documentation_is_understood(tmp_path, capsys):
    [text] = re.findall(r"```yaml\n(workers:.*?)```", SETTINGS, re.DOTALL)
    path = tmp_path / "kvplug.yaml"
    path.write_text(text.replace("/models/", f"{tmp_path}/"))
    for name in ("small", "large"):
        (tmp_path / name).mkdir()
    config, _ = parse(["--config", str(path)])
    assert (len(config.workers), config.router.temperature) == (2, 0.1)
    assert config.tokenizer_folders["org/small-model"] == tmp_path / "small"
