"""The prompts of a request body to token ids, equal to those that the engine computes.

In:  bodies of /v1/completions and /v1/chat/completions; the folder of the model.
Out: uint32 token ids, one array per prompt.

Routing hashes token ids, so "nearly the same text" is a miss. `tokenizers` alone does not do what
vLLM does: transformers, which vLLM asks, reads tokenizer_config.json on top of tokenizer.json and
changes the tokenizer by it (`_configure`). The facts were read in vLLM 0.32.0 and transformers
5.19.0; tests/server/vectors holds what those versions computed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from tokenizers import AddedToken, Encoding, Tokenizer, pre_tokenizers
from tokenizers.models import BPE

from kvplug.errors import TokenizerError
from kvplug.server.chat_messages import Json, cannot, flag
from kvplug.server.chat_template import ChatTemplates
from kvplug.server.piece_encoder import PieceEncoder

if TYPE_CHECKING:  # a tokenizer needs no kernels: who loads only this waits for no compilation
    from kvplug.hashing import Tokens

_U32_MAX = 2**32 - 1
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


def token_id_prompts(prompt: object) -> list[Tokens] | None:
    """Return the prompts that are token ids already; None if they are text.

    It is the `prompt` of a completion: text, a list of texts, token ids or a list of token ids.
    Anything else, and an id outside [0, 2**32), raises TokenizerError.
    """
    if isinstance(prompt, str):
        return None
    if not isinstance(prompt, list) or not prompt:
        raise cannot("read the prompt", "text or a list of texts or token ids", prompt)
    kinds = set(map(type, prompt))
    if kinds == {str}:
        return None
    return [_token_ids(ids) for ids in (prompt if kinds == {list} else [prompt])]


def first_token_ids(body: Mapping[str, Any]) -> Tokens | None:
    """Of the first prompt of a /v1/completions body, as the engine cuts it; None if it is text."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], list):
        prompt = prompt[:1]
    ids = token_id_prompts(prompt)
    return None if ids is None else _cut(ids[0], body)


def _token_ids(ids: list[Any]) -> Tokens:
    kinds = set(map(type, ids))  # at C speed; bool is an int to Python but no token id
    if not kinds <= {int}:
        found = ", ".join(sorted(kind.__name__ for kind in kinds - {int}))
        raise TokenizerError(f"cannot read the prompt: expected integers as token ids, got {found}")
    if ids and not 0 <= min(ids) <= max(ids) <= _U32_MAX:
        wrong = min(ids) if min(ids) < 0 else max(ids)
        raise cannot("read the prompt", "token ids in [0, 2**32)", wrong)
    return np.array(ids, dtype=np.uint32)


class PromptTokenizer:
    """Tokenizes request bodies as the engine does."""

    def __init__(
        self, backend: Tokenizer, templates: ChatTemplates, special_tokens: Mapping[str, str]
    ) -> None:
        """Use from_folder; special_tokens are the template's variables: bos_token and so on."""
        self._backend, self._encoder = backend, PieceEncoder(backend)
        self._templates = templates
        self._special_tokens = special_tokens

    @classmethod
    def from_folder(cls, folder: Path) -> Self:
        """Read tokenizer.json, tokenizer_config.json and the chat templates of a model folder.

        A missing template is an error of chat() only: base models have none.
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
        return cls(backend, templates, special_tokens)

    @classmethod
    def of_model(cls, name: str) -> Self:
        """As from_folder, of a folder or of a model that is in the local Hugging Face cache.

        Nothing is downloaded.
        """
        folder = Path(name)
        return cls.from_folder(folder if name and folder.is_dir() else _cached_folder(name))

    def completion(self, body: Mapping[str, Any]) -> list[Tokens]:
        """Token ids of each prompt of a /v1/completions body."""
        prompt = _prompt_of(body)
        given = token_id_prompts(prompt)
        if given is not None:
            return [_cut(ids, body) for ids in given]
        with_special = flag(body, "add_special_tokens", True)
        return [self._encode(text, body, with_special) for text in _texts(prompt)]

    def chat(self, body: Mapping[str, Any]) -> Tokens:
        """Token ids of the prompt that the chat template makes of a /v1/chat/completions body."""
        return self._encode(*self._chat_text(body))

    def first(self, body: Mapping[str, Any], *, is_chat: bool, max_new: int) -> Tokens | None:
        """Of a chat, or of the first text of a completion.

        None if more than `max_new` characters of it would have to be tokenized: the others are
        known from earlier prompts.
        """
        if is_chat:
            return self._encode_within(*self._chat_text(body), max_new)
        with_special = flag(body, "add_special_tokens", True)
        return self._encode_within(_texts(_prompt_of(body))[0], body, with_special, max_new)

    def _chat_text(self, body: Mapping[str, Any]) -> tuple[str, Mapping[str, Any], bool]:
        text = self._templates.render(body, self._special_tokens)
        return text, body, flag(body, "add_special_tokens", False)

    def _encode(self, text: str, body: Mapping[str, Any], with_special: bool) -> Tokens:
        ids = self._encode_within(text, body, with_special, len(text))
        assert ids is not None
        return ids

    def _encode_within(
        self, text: str, body: Mapping[str, Any], with_special: bool, max_new: int
    ) -> Tokens | None:
        limit = _limit(body) if body.get("truncation_side") is None else None
        try:
            if limit is None:
                ids = self._encoder.encode(text, with_special=with_special, max_new=max_new)
                return None if ids is None else _cut(ids, body)
            if len(text) > max_new:
                return None
            encoding = self._encode_end(text, limit, with_special)
        except Exception as error:
            # tokenizers raises TypeError for lone surrogates and a plain Exception for all else.
            raise TokenizerError(f"cannot tokenize a text: {error}") from error
        return _cut(np.array(encoding.ids, dtype=np.uint32), body)

    def _encode_end(self, text: str, limit: int, with_special: bool) -> Encoding:
        """Drop tokens at the left of the text only: the special tokens stay."""
        num_special = self._backend.num_special_tokens_to_add(False) if with_special else 0
        encoding = self._backend.encode(text, add_special_tokens=False)
        encoding.truncate(max(0, limit - num_special), direction="left")
        return self._backend.post_process(encoding, add_special_tokens=with_special)


def _prompt_of(body: Mapping[str, Any]) -> object:
    for field in ("prompt_embeds", "suffix"):
        if body.get(field) is not None:
            raise cannot("read the prompt", f"no {field} in the request", body[field])
    return body.get("prompt")


def _texts(prompt: object) -> list[str]:
    return prompt if isinstance(prompt, list) else [str(prompt)]


def _limit(body: Mapping[str, Any]) -> int | None:
    limit = body.get("truncate_prompt_tokens")
    if limit is not None and (type(limit) is not int or limit < -1):
        raise cannot("read the request", "an integer >= -1 in 'truncate_prompt_tokens'", limit)
    # -1 cuts at the engine's context length, which is not known here: few prompts are longer.
    return None if limit == -1 else limit


def _cut(ids: Tokens, body: Mapping[str, Any]) -> Tokens:
    limit = _limit(body)
    if limit is None or limit >= len(ids):
        return ids
    # vLLM keeps the end of a prompt unless it is told otherwise.
    return ids[:limit] if body.get("truncation_side") == "right" else ids[len(ids) - limit :]


# --- the model folder -------------------------------------------------------------------------


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
    """Where an engine on this machine has downloaded a model to that it was given by name."""
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(huggingface_hub.snapshot_download(name, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError) as error:
        raise TokenizerError(
            f"cannot find the tokenizer: expected {name!r} to be a folder, or a model in the "
            "Hugging Face cache of this machine"
        ) from error


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
