"""The vectors of /v1/messages and /v1/responses are what vLLM makes of the bodies."""

import json
import subprocess
from pathlib import Path

import pytest

from examples.launch.engine_env import ensure_vllm
from tests.tokenization.conftest import VECTORS

PROGRAM = Path(__file__).parent / "vllm_chat_bodies.py"
VECTORS_FILE = VECTORS / "apis" / "other_apis.json"


@pytest.mark.engine
def test_vllm_makes_these_chats_of_the_bodies():
    cases = json.loads(VECTORS_FILE.read_text(encoding="utf-8"))["cases"]
    answer = subprocess.run(
        [ensure_vllm(), str(PROGRAM)],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        check=True,
        timeout=200,
    )
    assert json.loads(answer.stdout) == [case["chat"] for case in cases]
