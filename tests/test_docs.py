"""The documentation says what is true: its code runs, its flags exist."""

import json
import re
import shlex
from pathlib import Path

import pytest

from kvplug.codec import Reason
from kvplug.engines.settings import PublisherConfig
from kvplug.index.apply_result import RejectReason
from kvplug.router.config import RouterConfig
from kvplug.server.cli import parse
from kvplug.server.config import ServerConfig
from kvplug.server.diagnosis import doctor
from kvplug.setting import settings_of
from kvplug.topics import Topic
from kvplug.wire import TIERS
from tests import settings_tables

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
SETTINGS = (ROOT / "docs" / "settings.md").read_text()
ENGINES = (ROOT / "docs" / "engines.md").read_text()
EVENTS = (ROOT / "docs" / "events.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("code", blocks("python"))
def test_python_in_the_readme_runs(code):
    exec(compile(code, "README.md", "exec"), {})


def test_the_router_command_in_the_readme_is_understood():
    [command] = [
        line
        for block in blocks("bash")
        for line in block.replace("\\\n", " ").splitlines()
        if "kvplug.router" in line
    ]
    config, _ = parse(shlex.split(command)[3:])
    assert [worker.events for worker in config.workers] == [
        "tcp://127.0.0.1:5557",
        "tcp://127.0.0.1:5558",
    ]


def test_every_setting_is_documented_with_its_default(capsys, monkeypatch):
    assert settings_tables.page(SETTINGS) == SETTINGS, "run `make docs`"
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit):
        parse(["--help"])
    flags = set(re.findall(r"^ +(--[a-z-]+)", capsys.readouterr().out, re.MULTILINE))
    assert flags - {"--version"} == set(flags_of_group("python -m kvplug.router")) - {"--mode"}


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


@pytest.mark.parametrize("config", [RouterConfig, ServerConfig])
def test_every_field_is_a_setting_with_a_flag(config):
    known = {field.name for field, _ in settings_of(config)}
    assert config.__dataclass_fields__.keys() - known <= {"router"}


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
    ]
    # What the engine itself reads, and does not pass on.
    own = [("enable_kv_cache_events", True), ("format", "dynamo")]
    for config, (name, value) in zip(configs, own, strict=True):
        assert (config.pop("publisher"), config.pop(name)) == ("kvplug", value)
        endpoints = PublisherConfig(**config).of_rank(1)
        assert endpoints == ("tcp://127.0.0.1:5558", "tcp://127.0.0.1:6558")


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


def test_links_between_the_pages_lead_somewhere():
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


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
