"""Bodies become the prompts that SGLang makes of them."""

import json

import pytest

from kvplug.errors import TokenizerError
from kvplug.tokenization.prompt_kind import Engine, PromptKind
from kvplug.tokenization.prompt_tokenizer import Extent, PromptTokenizer, first_token_ids
from tests.tokenization.sglang_cases import IDS_FILE, cases, write_models

CASES = {name: case for name, *case in cases()}
IDS = json.loads(IDS_FILE.read_text(encoding="utf-8"))["ids"]
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    write_models(folder)
    loaded = {}

    def tokenizer_of(family):
        if family not in loaded:
            loaded[family] = PromptTokenizer.from_folder(folder / family)
        return loaded[family]

    return tokenizer_of


def ids_of(tokenizer, body, kind):
    if kind == "completion" and (ready := first_token_ids(body)) is not None:
        return ready.tolist()
    prompt = tokenizer.first(body, PromptKind(kind), max_new=10**9, engine=Engine.SGLANG)
    assert prompt.extent is Extent.WHOLE
    return prompt.ids.tolist()


# Given ids are cut by the field that vLLM knows, whichever engine is asked.
IS_CUT = "dump-completion-cut_ids"


@pytest.mark.parametrize("name", [it for it in IDS if IDS[it] is not None and it != IS_CUT])
def test_the_prompt_is_that_of_sglang(tokenizers, name):
    family, kind, body = CASES[name]
    before = json.dumps(body)
    assert ids_of(tokenizers(family), body, kind) == IDS[name]
    assert json.dumps(body) == before


def test_the_vectors_are_of_these_bodies():
    assert IDS.keys() == CASES.keys()


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "nobody", "content": "x"}]},
        {"messages": [{"role": "user", "content": "x"}], "reasoning_effort": 7},
        {"messages": [{"role": "user", "content": "x"}], "tools": [{"function": {}}]},
        {"messages": [{"role": "user", "content": ["x"]}]},
        {"messages": [{"role": "user", "content": "x"}], "chat_template": "x"},
    ],
)
def test_what_sglang_refuses_has_no_prompt(tokenizers, body):
    with pytest.raises(TokenizerError, match="expected"):
        ids_of(tokenizers("chatml"), body, "chat")


def test_the_text_before_a_picture_has_the_tools_as_sglang_writes_them(tokenizers):
    tool = {"type": "function", "function": {"parameters": {}, "name": "weather"}}
    long = "now say what the cat and the dog do on the mat. " * 4

    def prompt_of(*content):
        messages = [{"role": "user", "content": [{"type": "text", "text": long}, *content]}]
        body = {"messages": messages, "tools": [tool]}
        return tokenizers("dump_parts").first(
            body, PromptKind.CHAT, max_new=10**9, engine=Engine.SGLANG
        )

    seen = prompt_of(PICTURE)
    assert seen.extent is Extent.BEFORE_MEDIA
    whole = prompt_of().ids.tolist()
    assert whole[: len(seen.ids)] == seen.ids.tolist()
