"""What a simulated engine is told: its command line, how long a step takes."""

import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest

from kvplug.errors import ConfigError
from kvplug.sim.engine_config import HELP, SimConfig, TimeModel, parse
from kvplug.sim.scheduler import SchedulerConfig
from kvplug.vllm_hashes import Lora

PAGE = (Path(__file__).parents[2] / "docs" / "simulation.md").read_text()
NAMES = [
    field.name
    for part in (SimConfig, SchedulerConfig, TimeModel)
    for field in fields(part)
    if field.name not in ("scheduler", "time_model")
]


def test_without_flags_it_is_the_default():
    assert parse([]) == (SimConfig(), "info")


def test_flags_reach_their_parts(tmp_path):
    config, log_level = parse(
        [
            *("--port", "8100", "--tokenizer", str(tmp_path), "--lora-modules", "a=/x", "b=/y"),
            *("--events-endpoint", "none", "--topic", "kv@x", "--log-level", "debug"),
            *("--num-gpu-blocks", "600", "--decode-base-s", "0"),
        ]
    )
    assert log_level == "debug"
    assert (config.port, config.tokenizer, config.root) == (8100, tmp_path, str(tmp_path))
    assert config.lora_modules == (Lora("a", "/x"), Lora("b", "/y"))
    assert (config.events_endpoint, config.topic) == (None, "kv@x")
    assert config.scheduler == SchedulerConfig(num_gpu_blocks=600)
    assert config.time_model == TimeModel(decode_base_s=0.0)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--no-such-flag 1", "unrecognized arguments: --no-such-flag"),
        ("--block-siz 32", "unrecognized arguments: --block-siz"),
        ("--port 70000", "port must be in [0, 65535], got 70000"),
        ("--block-size many", "invalid int value: 'many'"),
        ("--num-gpu-blocks 3", "num_gpu_blocks must be at least 513"),
        ("--prefill-tokens-per-s 0", "prefill_tokens_per_s must be above 0"),
        ("--tokenizer /no/such/folder", "expected a folder, '/no/such/folder' is none"),
        ("--lora-modules adapter", "expected NAME=PATH, got 'adapter'"),
        ("--events-endpoint 5557", "expected an endpoint like tcp://127.0.0.1:5557, or none"),
        (
            "--events-endpoint none --replay-endpoint tcp://127.0.0.1:0",
            "replay_endpoint needs an events_endpoint",
        ),
        ("--buffer-steps 0", "buffer_steps must be at least 1, got 0"),
        ("--grace-s 0", "grace_s must be above 0, got 0.0"),
    ],
)
def test_wrong_flags_end_with_code_2_and_a_sentence(flags, sentence, capsys):
    with pytest.raises(SystemExit) as left:
        parse(flags.split())
    assert left.value.code == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("name", NAMES)
def test_every_flag_is_explained_and_documented_with_its_default(name):
    assert HELP[name]
    config = SimConfig()
    part = next(p for p in (config, config.scheduler, config.time_model) if hasattr(p, name))
    default = getattr(part, name)
    text = {None: "none", (): "none", "": "(empty)"}.get(default, str(default))
    flag = "--" + name.replace("_", "-")
    assert re.search(rf"^\| `{flag}( [A-Z=]+)?` \| {re.escape(text)} \|", PAGE, re.M)


def test_the_code_on_the_page_runs(capsys):
    [command] = re.findall(r"```bash\npython -m kvplug.sim.engine (.*)\n```", PAGE)
    assert parse(shlex.split(command))[0].port == 8100
    [code] = re.findall(r"^```python\n(.*?)```", PAGE, re.DOTALL | re.MULTILINE)
    exec(compile(code, "simulation.md", "exec"), {})
    assert re.fullmatch(r"1\.\d\d s for 50 tokens\n", capsys.readouterr().out)


MODEL = TimeModel(
    prefill_tokens_per_s=1000.0,
    decode_base_s=0.010,
    decode_per_sequence_s=0.001,
    step_overhead_s=0.002,
)


@pytest.mark.parametrize(
    ("num_prefill_tokens", "num_decodes", "expected_s"),
    [(0, 0, 0.002), (500, 0, 0.502), (0, 1, 0.013), (0, 8, 0.020), (500, 8, 0.520)],
)
def test_a_step_is_the_sum_of_its_parts(num_prefill_tokens, num_decodes, expected_s):
    step_s = MODEL.step_s(num_prefill_tokens=num_prefill_tokens, num_decodes=num_decodes)
    assert step_s == pytest.approx(expected_s)


@pytest.mark.parametrize(
    ("field", "value"),
    [("prefill_tokens_per_s", 0.0), ("decode_base_s", -1.0), ("step_overhead_s", float("nan"))],
)
def test_values_that_are_no_times_are_rejected(field, value):
    with pytest.raises(ConfigError, match=field):
        TimeModel(**{field: value})
