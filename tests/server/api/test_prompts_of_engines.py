"""A prompt is that of the engines that serve the model."""

import json

import pytest

from kvplug.server.api.prompts import Prompts, Reason
from kvplug.tokenization.prompt_kind import Engine, PromptKind
from kvplug.tokenization.prompt_tokenizer import Extent
from tests.tokenization.sglang_cases import IDS_FILE, cases, write_models

CASES = {name: body for name, _, _, body in cases()}
OF_SGLANG = json.loads(IDS_FILE.read_text(encoding="utf-8"))["ids"]
BOTH = frozenset(Engine)


@pytest.fixture
def prompts(tmp_path):
    write_models(tmp_path)
    made = Prompts({"": tmp_path / "chatml"})
    yield made
    made.close()


async def prompt_of(prompts, name, engines):
    body = {"model": "m", **CASES[f"chatml-chat-{name}"]}
    known = await prompts.tokens_of(body, "", kind=PromptKind.CHAT, size=9, engines=engines)
    return known.prompt


@pytest.mark.parametrize("name", ["closed", "turns", "tools", "prefill"])
async def test_of_sglang(prompts, name):
    prompt = await prompt_of(prompts, name, {Engine.SGLANG})
    assert prompt.ids.tolist() == OF_SGLANG[f"chatml-chat-{name}"]


async def test_of_both_where_they_agree(prompts):
    prompt = await prompt_of(prompts, "turns", BOTH)
    assert (prompt.ids.tolist(), prompt.extent) == (OF_SGLANG["chatml-chat-turns"], Extent.WHOLE)
    assert not prompts.without_prefix


async def test_of_both_up_to_where_they_differ(prompts):
    whole = [(await prompt_of(prompts, "tools", {engine})).ids.tolist() for engine in Engine]
    prompt = await prompt_of(prompts, "tools", BOTH)
    known = len(prompt.ids)
    assert prompt.extent is Extent.KNOWN_BEGINNING
    assert [ids[:known] for ids in whole] == [prompt.ids.tolist()] * 2
    assert whole[0][known] != whole[1][known]
    assert prompts.without_prefix == {Reason.ENGINES_DIFFER: 1}
