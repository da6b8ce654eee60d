import copy
import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplug.errors import TokenizerError
from kvplug.server.tokenizer import PromptTokenizer, first_token_ids, token_id_prompts

VECTORS = Path(__file__).parent / "vectors"
TOKENIZERS = {"byte_level.json", "sentencepiece.json"}
FAMILIES = {
    path.stem: json.loads(path.read_text(encoding="utf-8"))
    for path in sorted(VECTORS.glob("*.json"))
    if path.name not in TOKENIZERS
}
HELLO = {"messages": [{"role": "user", "content": "hello"}]}


def cases(kind):
    """Bodies and what vLLM 0.32.0 (transformers 5.19.0) computed for them."""
    return [
        pytest.param(name, case, id=f"{name}-{case['name']}")
        for name, family in FAMILIES.items()
        for case in family[kind]
    ]


def write_folder(folder, tokenizer, files):
    files = {"tokenizer.json": (VECTORS / tokenizer).read_text(encoding="utf-8"), **files}
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    return {
        name: PromptTokenizer.from_folder(
            write_folder(tmp_path_factory.mktemp(name), family["tokenizer"], family["files"])
        )
        for name, family in FAMILIES.items()
    }


@pytest.fixture
def load(tmp_path):
    """Return a function: files of a folder -> its tokenizer."""
    return lambda **files: PromptTokenizer.from_folder(
        write_folder(
            tmp_path,
            "byte_level.json",
            {name.replace("__", "."): content for name, content in files.items()},
        )
    )


def ids_of(arrays):
    assert all(array.dtype == np.uint32 for array in arrays)
    return [array.tolist() for array in arrays]


# --- against vLLM -----------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "case"), cases("chat"))
def test_chat_ids_are_those_of_vllm(tokenizers, family, case):
    assert ids_of([tokenizers[family].chat(case["body"])]) == [case["ids"]]


@pytest.mark.parametrize(("family", "case"), cases("completion"))
def test_completion_ids_are_those_of_vllm(tokenizers, family, case):
    assert ids_of(tokenizers[family].completion(case["body"])) == case["ids"]


@pytest.mark.parametrize(("family", "case"), cases("refused"))
def test_what_vllm_refuses_is_rejected(tokenizers, family, case):
    with pytest.raises(TokenizerError):
        tokenizers[family].chat(case["body"])


@pytest.mark.parametrize(("family", "case"), cases("chat"))
def test_the_body_stays_as_it_is(tokenizers, family, case):
    body = copy.deepcopy(case["body"])
    tokenizers[family].chat(body)
    assert body == case["body"]


def test_vectors_name_what_made_them():
    made_with = {json.dumps(family["made_with"], sort_keys=True) for family in FAMILIES.values()}
    assert len(made_with) == 1
    assert json.loads(made_with.pop()).keys() >= {"vllm", "transformers", "tokenizers", "jinja2"}


# --- prompts that are token ids ---------------------------------------------------------------

token_ids = st.lists(st.integers(0, 2**32 - 1), max_size=20)


@given(token_ids.filter(bool))
def test_one_list_of_token_ids_is_one_prompt(ids):
    assert ids_of(token_id_prompts(ids)) == [ids]


@given(st.lists(token_ids, min_size=1, max_size=4))
def test_lists_of_token_ids_are_prompts(prompts):
    assert ids_of(token_id_prompts(prompts)) == prompts


@pytest.mark.parametrize("prompt", ["", "text", ["a"], ["a", "b"]])
def test_text_is_no_token_ids(prompt):
    assert token_id_prompts(prompt) is None


@pytest.mark.parametrize("prompt", [[1, 2, 3, 4], [[1, 2, 3, 4], [5]]])
@pytest.mark.parametrize(
    ("more", "ids"),
    [
        ({}, [1, 2, 3, 4]),
        ({"truncate_prompt_tokens": 3}, [2, 3, 4]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, [1, 2, 3]),
    ],
)
def test_the_first_token_ids_are_cut_as_the_engine_cuts_them(prompt, more, ids):
    assert first_token_ids({"prompt": prompt, **more}).tolist() == ids


@pytest.mark.parametrize(
    ("prompt", "seen"),
    [
        (None, "got None"),
        ([], r"got \[\]"),
        ({"prompt": "x"}, "got {'prompt': 'x'}"),
        ([1, "a"], "got str"),
        (["a", 1], "got str"),
        ([1.0, 2], "got float"),
        ([True, 2], "got bool"),
        ([None], "got NoneType"),
        ([[1], 2], "got list"),
        ([[1], "a"], "got list, str"),
        ([[[1]]], "got list"),
        ([1, -1], "got -1"),
        ([2**32], "got 4294967296"),
        ([[0], [2**70]], "got 11805"),
    ],
)
def test_a_prompt_of_a_wrong_kind_is_rejected_in_a_sentence(prompt, seen):
    with pytest.raises(TokenizerError, match=rf"^cannot read the prompt: expected .*, {seen}"):
        token_id_prompts(prompt)


# --- bodies -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({}, "expected text or a list"),
        ({"prompt": "a", "suffix": "b"}, "expected no suffix"),
        ({"prompt": "a", "prompt_embeds": "AAAA"}, "expected no prompt_embeds"),
        ({"prompt": "a", "add_special_tokens": "yes"}, "true or false in 'add_special_tokens'"),
        ({"prompt": "a", "truncate_prompt_tokens": "5"}, "an integer >= -1"),
        ({"prompt": "a", "truncate_prompt_tokens": -2}, "an integer >= -1"),
        ({"prompt": [1], "truncate_prompt_tokens": True}, "an integer >= -1"),
        ({"prompt": "a\ud800b"}, "cannot tokenize a text"),
        ({"prompt": "a\ud800b", "truncate_prompt_tokens": 3}, "cannot tokenize a text"),
    ],
)
def test_a_completion_that_cannot_be_tokenized(tokenizers, body, sentence):
    with pytest.raises(TokenizerError, match=sentence):
        tokenizers["dump"].completion(body)


@pytest.mark.parametrize("limit", [0, 1, 2, 8, 100])
def test_a_limit_keeps_the_special_tokens_and_the_end(tokenizers, limit):
    prompt = {"prompt": "the cat sat on the mat"}
    (bos, *text), cut = (
        tokenizers["dump"].completion({**prompt, **more})[0].tolist()
        for more in ({}, {"truncate_prompt_tokens": limit})
    )
    assert cut == ([bos] + (text[-limit + 1 :] if limit > 1 else []))[:limit]


# --- the model folder -------------------------------------------------------------------------


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    """A cache with one model, as huggingface_hub lays it out."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    model = tmp_path / "models--org--tiny"
    write_folder(model / "snapshots" / "0123", "byte_level.json", {"tokenizer_config.json": {}})
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("0123")


def test_a_model_of_the_hub_is_taken_from_the_local_cache(hub_cache):
    tokenizer = PromptTokenizer.of_model("org/tiny")
    assert tokenizer.completion({"prompt": "hello"})[0].tolist()


@pytest.mark.parametrize("name", ["org/other", "/nowhere/at/all", "", "no such name"])
def test_a_model_that_is_not_here_is_named(hub_cache, name):
    with pytest.raises(TokenizerError, match="in the Hugging Face cache of this machine"):
        PromptTokenizer.of_model(name)


def test_a_folder_without_tokenizer_is_rejected_with_the_fix(tmp_path):
    with pytest.raises(TokenizerError, match=re.escape(f"expected tokenizer.json in {tmp_path}")):
        PromptTokenizer.from_folder(tmp_path)
    with pytest.raises(TokenizerError, match="save_pretrained"):
        PromptTokenizer.from_folder(tmp_path)


def test_a_base_model_completes_but_does_not_chat(load, tmp_path):
    tokenizer = load()
    assert len(tokenizer.completion({"prompt": "hello"})) == 1
    with pytest.raises(TokenizerError, match=re.escape(f"no chat template in {tmp_path}; put")):
        tokenizer.chat(HELLO)


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer__json": "{}"},
        {"tokenizer__json": "no JSON"},
        {"tokenizer_config__json": "no JSON"},
        {"tokenizer_config__json": "[]"},
        {"tokenizer_config__json": {"chat_template": "{% for %}"}},
        {"tokenizer_config__json": {"chat_template": [{"name": "default"}]}},
        {"tokenizer_config__json": {"chat_template": 5}},
        {"tokenizer_config__json": {"added_tokens_decoder": {"x": {"content": "y"}}}},
        {"tokenizer_config__json": {"added_tokens_decoder": {"5": {"text": "y"}}}},
        {"tokenizer_config__json": {"extra_special_tokens": 5}},
        {"config__json": {"architectures": 5}},
        {"chat_template__json": "{"},
    ],
)
def test_a_broken_file_is_a_tokenizer_error(load, files):
    with pytest.raises(TokenizerError, match=r"^cannot "):
        load(**files)


def test_a_file_that_is_no_utf8_is_a_tokenizer_error(load, tmp_path):
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(TokenizerError, match=r"cannot read .*chat_template\.jinja"):
        load()


def test_models_that_vllm_renders_with_its_own_code_are_not_rendered(load):
    config = {"chat_template": "{{ messages }}"}
    own = load(config__json={"architectures": ["GptOssForCausalLM"]}, tokenizer_config__json=config)
    with pytest.raises(TokenizerError, match="GptOssForCausalLM without a template"):
        own.chat(HELLO)
    mistral = load(
        config__json={},
        tekken__json={},
        **{"consolidated__safetensors": ""},
        tokenizer_config__json=config,
    )
    with pytest.raises(TokenizerError, match="mistral-common"):
        mistral.chat(HELLO)


def test_older_folders_keep_special_tokens_in_a_file_of_their_own(load):
    bos = {"content": "<s>", "lstrip": False, "normalized": False, "rstrip": False}
    tokenizer = load(
        special_tokens_map__json={"bos_token": bos, "eos_token": "<|eos|>"},
        tokenizer_config__json={
            "eos_token": "no",
            "chat_template": "{{ bos_token }}{{ eos_token }}",
        },
    )
    ids = tokenizer.chat(HELLO).tolist()
    assert len(ids) == 2, "both are one token, <s> is new"
    assert ids[1] == tokenizer.completion({"prompt": "<|eos|>", "add_special_tokens": False})[0]


def test_special_tokens_are_split_if_the_folder_says_so(load):
    body = {"prompt": "<|eos|>", "add_special_tokens": False}
    assert len(load().completion(body)[0]) == 1
    assert len(load(tokenizer_config__json={"split_special_tokens": True}).completion(body)[0]) > 1


def test_a_processor_brings_the_template_for_chats_without_tools(load):
    templates = {
        "tokenizer_config__json": {"chat_template": "the tokenizer's"},
        "chat_template__json": {"chat_template": "the processor's"},
    }
    texts = {"tokenizer's": "the tokenizer's", "processor's": "the processor's"}
    expected = {
        name: load().completion({"prompt": text, "add_special_tokens": False})[0].tolist()
        for name, text in texts.items()
    }
    with_tools = {**HELLO, "tools": [{"function": {"name": "f"}}]}
    text_only = load(**templates)
    assert text_only.chat(HELLO).tolist() == expected["tokenizer's"]
    multi_modal = load(**templates, preprocessor_config__json={})
    assert multi_modal.chat(HELLO).tolist() == expected["processor's"]
    assert multi_modal.chat(with_tools).tolist() == expected["tokenizer's"]
