"""What the files of a model's folder make of its tokenizer."""

import hashlib
import re

import pytest

from kvplug.errors import TokenizerError
from kvplug.tokenization.model_folder import find_model_folder
from kvplug.tokenization.prompt_tokenizer import PromptTokenizer
from tests.hub_cache import REVISION, put_into_hub_cache
from tests.tokenization.conftest import write_folder

HELLO = {"messages": [{"role": "user", "content": "hello"}]}


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


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    """A cache with one model, of which an engine has fetched what it needs."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    write_folder(tmp_path / "files", "byte_level.json", {"tokenizer_config.json": {}})
    put_into_hub_cache(tmp_path, "org/tiny", tmp_path / "files")
    return tmp_path


@pytest.mark.parametrize(
    "name", ["org/tiny", f"/data/hf/hub/models--org--tiny/snapshots/{REVISION}"]
)
def test_a_model_of_the_hub_is_taken_from_the_local_cache(hub_cache, name):
    """Also if an engine on another machine names the folder in its own cache."""
    tokenizer = PromptTokenizer.of_model(name)
    assert tokenizer.completion({"prompt": "hello"})[0].tolist()
    content = (hub_cache / "files" / "tokenizer.json").read_bytes()
    assert tokenizer.digest == hashlib.sha256(content).hexdigest()[:16]


def test_of_several_revisions_the_named_one_is_taken_and_else_main(hub_cache):
    other = "f" * 40
    put_into_hub_cache(hub_cache, "org/tiny", hub_cache / "files", ref=None, revision=other)
    snapshots = hub_cache / "hub" / "models--org--tiny" / "snapshots"
    assert find_model_folder("org/tiny") == snapshots / REVISION
    assert find_model_folder(f"/x/models--org--tiny/snapshots/{other}") == snapshots / other
    assert find_model_folder("/x/models--org--tiny/snapshots/0") == snapshots / REVISION


def test_the_only_revision_is_taken_if_none_is_main(hub_cache):
    (hub_cache / "hub" / "models--org--tiny" / "refs" / "main").unlink()
    snapshots = hub_cache / "hub" / "models--org--tiny" / "snapshots"
    assert find_model_folder("org/tiny") == snapshots / REVISION
    put_into_hub_cache(hub_cache, "org/tiny", hub_cache / "files", ref=None, revision="f" * 40)
    with pytest.raises(TokenizerError, match="in the Hugging Face cache of this machine"):
        find_model_folder("org/tiny")


@pytest.mark.parametrize("name", ["org/other", "/nowhere/at/all", "", "no such name", "../hub"])
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
