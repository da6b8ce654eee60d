"""The prompts of the vectors are those that SGLang's own code makes of the bodies."""

import json
import subprocess
from pathlib import Path

import pytest

from examples.launch.sglang_env import ensure_sglang
from tests.tokenization.sglang_cases import IDS_FILE, cases, write_models

PROGRAM = Path(__file__).parent / "sglang_prompts.py"


def asked(tmp_path):
    """By name, what SGLang answers."""
    write_models(tmp_path)
    # A parser, as thinking is refused without one.
    questions = [
        {"folder": str(tmp_path / family), "kind": kind, "body": body, "parser": "qwen3"}
        for _, family, kind, body in cases()
    ]
    answer = subprocess.run(
        [ensure_sglang(), str(PROGRAM)],
        input=json.dumps(questions),
        capture_output=True,
        text=True,
        check=True,
        timeout=200,
    )
    names = [name for name, *_ in cases()]
    return dict(zip(names, json.loads(answer.stdout), strict=True))


@pytest.mark.engine
def test_sglang_makes_these_prompts_of_the_bodies(tmp_path):
    assert asked(tmp_path) == json.loads(IDS_FILE.read_text(encoding="utf-8"))["ids"]
