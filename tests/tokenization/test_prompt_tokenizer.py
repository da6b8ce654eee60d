import copy
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplug.errors import TokenizerError
from kvplug.tokenization.prompt_tokenizer import PromptTokenizer, first_token_ids, token_id_prompts
from tests.tokenization.conftest import VECTORS, write_folder

TOKENIZERS = {"byte_level.json", "sentencepiece.json"}
FAMILIES = {
    path.stem: json.loads(path.read_text(encoding="utf-8"))
    for path in sorted(VECTORS.glob("*.json"))
    if path.name not in TOKENIZERS
}


def cases(kind):
    """Bodies and what vLLM 0.32.0 (transformers 5.19.0) computed for them."""
    return [
        pytest.param(name, case, id=f"{name}-{case['name']}")
        for name, family in FAMILIES.items()
        for case in family[kind]
    ]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    return {
        name: PromptTokenizer.from_folder(
            write_folder(tmp_path_factory.mktemp(name), family["tokenizer"], family["files"])
        )
        for name, family in FAMILIES.items()
    }


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
