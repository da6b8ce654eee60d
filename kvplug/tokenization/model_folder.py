"""The folder of a model to its tokenizer and chat templates, equal to those of the engine.

In:  tokenizer.json, tokenizer_config.json, config.json, the chat templates.   Out: ModelFiles.

`tokenizers` alone does not do what vLLM does: transformers, which vLLM asks, reads
tokenizer_config.json on top of tokenizer.json and changes the tokenizer by it (`_configure`). The
facts were read in vLLM 0.32.0 and transformers 5.19.0; tests/tokenization/vectors holds what those
versions computed.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from tokenizers import AddedToken, Tokenizer, pre_tokenizers
from tokenizers.models import BPE

from kvplug.errors import TokenizerError
from kvplug.tokenization.chat_messages import Json, cannot
from kvplug.tokenization.chat_template import ChatTemplates

# transformers 5 builds these anew, from the vocabulary alone, for models of type "llama".
_LLAMA_CLASSES = ("LlamaTokenizer", "LlamaTokenizerFast")
_LLAMA_SPECIAL_TOKENS = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
# Models whose chats vLLM 0.32 renders with code of its own: the folder's template is not used.
# fmt: off
_OWN_CHAT_CODE = frozenset([
    "DeepseekV32ForCausalLM", "DeepseekV41ForCausalLM", "DeepseekV4ForCausalLM",
    "DeepseekV4ForConditionalGeneration", "GptOssForCausalLM", "InklingForCausalLM",
    "InklingForConditionalGeneration", "KimiK3ForConditionalGeneration",
])
# fmt: on


# A model as a hub names it, and the folder of one revision of it in a cache, on any machine.
_HUB_NAME = re.compile(r"[\w-][\w.-]*(?:/[\w-][\w.-]*)?")
_HUB_FOLDER = re.compile(r"(?:^|/)models--([\w.-]+)/snapshots/(\w+)/?$")
_NUM_DIGITS = 16


class ModelFiles(NamedTuple):
    """What a folder says; special_tokens are variables of the templates: bos_token and so on;
    digest: the first 16 hex digits of the SHA-256 of tokenizer.json.
    """

    backend: Tokenizer
    templates: ChatTemplates
    special_tokens: Mapping[str, str]
    digest: str


def find_model_folder(name: str) -> Path:
    """The folder of that name, or where this machine keeps the model of that name from the hub.

    The name may also be the model's folder in the Hugging Face cache of another machine. Nothing is
    downloaded; TokenizerError if there is none.
    """
    folder = Path(name)
    return folder if name and folder.is_dir() else _cached_folder(name)


def read_model_folder(folder: Path) -> ModelFiles:
    """Read and configure; raises TokenizerError.

    A missing template is an error of rendering only: base models have none.
    """
    config = _tokenizer_config(folder)
    model = _read_json(folder / "config.json")
    backend = _load_backend(folder)
    try:
        special_tokens = _configure(backend, config, model)
        templates = _load_templates(folder, config, model)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise TokenizerError(
            f"cannot read the JSON files of {folder}: expected the fields that transformers "
            f"writes, got {error!r}"
        ) from error
    digest = hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()[:_NUM_DIGITS]
    return ModelFiles(backend, templates, special_tokens, digest)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"cannot read {path}: {error}") from error


def _read_json(path: Path) -> Json:
    """Read an object; a missing file is an empty one."""
    if not path.is_file():
        return {}
    text = _read_text(path)
    try:
        content = json.loads(text)
    except ValueError as error:
        raise TokenizerError(f"cannot read {path}: expected JSON, got {error}") from error
    if not isinstance(content, dict):
        raise cannot(f"read {path}", "a JSON object", content)
    return content


def _cached_folder(name: str) -> Path:
    """Of the revision in the name, else of `main`, else the only one that is there.

    `snapshot_download` of huggingface_hub 2.4 finds only snapshots with every file of the
    repository, and engines fetch the files that they need.
    """
    from huggingface_hub.constants import HF_HUB_CACHE

    model, revision = _hub_model(name)
    cached = Path(HF_HUB_CACHE) / f"models--{model.replace('/', '--')}"
    snapshots = {each.name: each for each in cached.glob("snapshots/*")} if model else {}
    for wanted in (revision, _main_revision(cached)):
        if wanted in snapshots:
            return snapshots[wanted]
    if len(snapshots) == 1:
        return snapshots.popitem()[1]
    raise TokenizerError(
        f"cannot find the tokenizer: expected {name!r} to be a folder, or a model in the "
        "Hugging Face cache of this machine"
    )


def _hub_model(name: str) -> tuple[str, str]:
    """The model and the revision that are meant; "" for what is not said."""
    if folder := _HUB_FOLDER.search(name):
        return folder[1].replace("--", "/"), folder[2]
    return (name, "") if _HUB_NAME.fullmatch(name) else ("", "")


def _main_revision(cached: Path) -> str:
    ref = cached / "refs" / "main"
    return _read_text(ref).strip() if ref.is_file() else ""


def _tokenizer_config(folder: Path) -> Json:
    config = _read_json(folder / "tokenizer_config.json")
    if "added_tokens_decoder" in config:
        return config
    # An older folder: its special tokens are in a file of their own.
    return config | _read_json(folder / "special_tokens_map.json")


def _load_backend(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise TokenizerError(
            f"cannot load the tokenizer: expected tokenizer.json in {folder}, found none; "
            "write it with AutoTokenizer.from_pretrained(...).save_pretrained(...) of transformers"
        )
    try:
        backend = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises a plain Exception
        raise TokenizerError(f"cannot load the tokenizer from {path}: {error}") from error
    # Settings of training that the file may carry.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _configure(backend: Tokenizer, config: Json, model: Json) -> dict[str, str]:
    """Change the tokenizer as transformers does by its configuration; returns special tokens."""
    if config.get("tokenizer_class") in _LLAMA_CLASSES and model.get("model_type") == "llama":
        config = _LLAMA_SPECIAL_TOKENS | config
        _rebuild_as_llama(backend, config)
    named = _special_tokens(config)
    special_tokens = {key: token.content for key, token in named.items()}
    _add_tokens(backend, config, [*named.values(), *_unnamed_special_tokens(config)])
    backend.encode_special_tokens = bool(config.get("split_special_tokens", False))
    return special_tokens


def _special_tokens(config: Json) -> dict[str, AddedToken]:
    """Find the special tokens with a name: the standard ones and what else is called ..._token."""
    named = {key: value for key, value in config.items() if key.endswith("_token")}
    extra = config.get("extra_special_tokens")
    named |= extra if isinstance(extra, dict) else {}
    # add_bos_token and its like are true or false: no tokens.
    return {key: _added(value) for key, value in named.items() if isinstance(value, str | dict)}


def _unnamed_special_tokens(config: Json) -> list[AddedToken]:
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    return [] if isinstance(extra, dict) else [_added(value) for value in extra]


def _added(value: str | Json) -> AddedToken:
    if isinstance(value, str):
        return AddedToken(value, special=True)
    flags = {name: value[name] for name in _TOKEN_FLAGS if name in value}
    return AddedToken(value["content"], **flags)


def _add_tokens(backend: Tokenizer, config: Json, special_tokens: list[AddedToken]) -> None:
    """Add what tokenizer.json lacks; the flags in added_tokens_decoder replace those in it."""
    decoder = config.get("added_tokens_decoder") or {}
    listed = [_added(decoder[token_id]) for token_id in sorted(decoder, key=int)]
    known = {token.content for token in (*backend.get_added_tokens_decoder().values(), *listed)}
    late = {token.content: token for token in special_tokens if token.content not in known}
    special = {token.content for token in special_tokens}
    for token in (*listed, *late.values()):
        token.special = token.special or token.content in special
    backend.add_tokens([*listed, *late.values()])


def _rebuild_as_llama(backend: Tokenizer, config: Json) -> None:
    """Put spaces where LlamaTokenizer of transformers 5 does, which is built without the file.

    tokenizer.json has one behind each special token; the class, only at the start of the text.
    """
    if not isinstance(backend.model, BPE) or not backend.model.byte_fallback:
        return
    scheme = "always" if config.get("legacy") else "first"
    scheme = "never" if config.get("add_prefix_space") is False else scheme
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=scheme, split=False)


def _load_templates(folder: Path, config: Json, model: Json) -> ChatTemplates:
    if own := _OWN_CHAT_CODE.intersection(model.get("architectures") or []):
        return ChatTemplates({}, if_none=f"vLLM renders chats of {min(own)} without a template")
    if _is_mistral_format(folder):
        return ChatTemplates({}, if_none=f"vLLM renders chats of {folder} by mistral-common")
    named = _template_files(folder) or _configured_templates(config)
    legacy = _read_json(folder / "chat_template.json").get("chat_template")
    # That file belongs to the processor of a multi-modal model, which vLLM asks first; but the
    # tokenizer's templates know more of tools.
    has_processor = any(folder.glob("*processor_config.json"))
    return ChatTemplates(
        named,
        without_tools=legacy if has_processor or not named else None,
        if_none=f"no chat template in {folder}; put the model's chat_template.jinja there",
    )


def _is_mistral_format(folder: Path) -> bool:
    """Tell a folder that vLLM reads with mistral-common, whatever else is in it."""
    vocabularies = (*folder.glob("tekken.json"), *folder.glob("tokenizer.model.v*"))
    return bool(vocabularies) and any(folder.glob("consolidated*.safetensors"))


def _template_files(folder: Path) -> dict[str, str]:
    files = {path.stem: path for path in (folder / "additional_chat_templates").glob("*.jinja")}
    if (folder / "chat_template.jinja").is_file():
        files.setdefault("default", folder / "chat_template.jinja")
    return {name: _read_text(path) for name, path in files.items()}


def _configured_templates(config: Json) -> dict[str, str]:
    template = config.get("chat_template")
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template}
    return {"default": template} if template else {}
