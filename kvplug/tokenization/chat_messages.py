"""What vLLM makes of the messages, tools and options of a chat body before its template runs.

In:  the body of /v1/chat/completions.   Out: messages and options as the template gets them.

A template never sees the body as the client sent it: vLLM validates it, drops what it does not
know, orders the fields and brings the content into the form that the template reads. One space of
difference is another block hash, so all of this is done here too. The facts were read in vLLM
0.32.0; tests/tokenization/vectors holds what it computed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from reprlib import repr as shortened
from typing import Any

from kvplug.errors import TokenizerError
from kvplug.tokenization.content_format import ContentFormat

Json = dict[str, Any]

# fmt: off
# Where a part of each type that is no picture and no sound has its text.
_TEXT_KEYS = {
    "text": "text", "input_text": "text", "output_text": "text",
    "refusal": "refusal", "thinking": "thinking", "tool_reference": "name",
}
# What vLLM knows of parts of any type; a field that it does not know reaches an "openai" template.
_PART_FIELDS = frozenset([
    "audio_embeds", "audio_url", "closed", "data", "file", "image_embeds", "image_pil",
    "image_url", "input_audio", "name", "prompt_cache_breakpoint", "refusal", "text", "thinking",
    "type", "uuid", "video_embeds", "video_url",
])
# Arguments of the engine's own rendering call: a body that sets one changes more than the text.
RESERVED_OPTIONS = frozenset([
    "chat_template", "conversation", "max_length", "messages", "padding",
    "return_assistant_tokens_mask", "return_dict", "return_tensors", "self", "tokenize",
    "tokenizer_kwargs", "truncation",
])
# fmt: on
_UNSET = (None, "auto")
# Claude Code's attribution line differs in every request; vLLM drops it for the prefix cache.
BILLING_HEADER = "x-anthropic-billing-header"


def cannot(attempt: str, expected: str, got: object) -> TokenizerError:
    """Make the error whose sentence says what was attempted, what was expected and what came."""
    return TokenizerError(f"cannot {attempt}: expected {expected}, got {shortened(got)}")


def object_list(attempt: str, value: object, name: str) -> list[Json]:
    """A field that is a list of objects; TokenizerError for anything else."""
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise cannot(attempt, f"a list of objects in {name!r}", value)
    return value


def text_in(attempt: str, value: object, name: str) -> str:
    """A field that is text; TokenizerError for anything else."""
    if not isinstance(value, str):
        raise cannot(attempt, f"text in {name!r}", value)
    return value


def flag(body: Mapping[str, Any], name: str, default: bool) -> bool:
    """Read a true/false field of a body."""
    value = body.get(name, default)
    if not isinstance(value, bool):
        raise cannot("read the request", f"true or false in {name!r}", value)
    return value


def options_of(body: Mapping[str, Any]) -> Json:
    """Collect what the template gets beside the messages; fields win over chat_template_kwargs."""
    given = body.get("chat_template_kwargs") or {}
    if not isinstance(given, dict):
        raise cannot("render a chat", "an object in chat_template_kwargs", given)
    effort = body.get("reasoning_effort")
    # Asking for an effort switches thinking on or off, unless the client does so itself.
    thinking = None if effort is None else given.get("enable_thinking", effort != "none")
    fields = {
        "add_generation_prompt": flag(body, "add_generation_prompt", True),
        "continue_final_message": flag(body, "continue_final_message", False),
        "documents": _objects(body, "documents"),
        "reasoning_effort": effort,
        "enable_thinking": thinking,
    }
    tools = _objects(body, "tools")
    options: Json = {"documents": None, "tools": tools and [_tool(tool) for tool in tools]}
    for source in (given, fields):
        options |= {name: value for name, value in source.items() if value not in _UNSET}
    return options


def _objects(body: Mapping[str, Any], name: str) -> list[Json] | None:
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise cannot("render a chat", f"a list of objects in {name!r}", value)
    return value


def _tool(tool: Json) -> Json:
    """Rebuild a tool as vLLM's request model prints it: fixed order, absent fields null."""
    function = _function_of(tool)
    deferred = tool.get("defer_loading")
    rebuilt = {name: function.get(name) for name in ("name", "description", "parameters")}
    if function.get("strict") is not None:
        rebuilt["strict"] = function["strict"]
    inner = function.get("defer_loading")
    if inner is not None or deferred is not None:
        rebuilt["defer_loading"] = deferred if inner is None else inner
    outer = {"type": "function", "function": rebuilt}
    return outer if deferred is None else {**outer, "defer_loading": deferred}


def _function_of(tool: Json) -> Json:
    function = tool.get("function")
    if tool.get("type", "function") != "function" or not isinstance(function, dict):
        raise cannot("render a chat", "a tool or a tool call of type 'function'", tool)
    return function


def conversation(messages: object, form: ContentFormat) -> list[Json]:
    """Turn the messages of a body into new ones, as vLLM hands them to the template."""
    if not isinstance(messages, list) or not messages:
        raise cannot("render a chat", "a list with a message in 'messages'", messages)
    return [_message(message, form) for message in messages]


def _message(message: object, form: ContentFormat) -> Json:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise cannot("render a chat", "an object with a role as message", message)
    role = message["role"]
    known = {"role": role, "content": _content(message, form)}
    if role == "assistant":
        known |= _assistant_fields(message)
    if role == "tool" and "tool_call_id" in message:
        known["tool_call_id"] = message["tool_call_id"]
    for name in ("name", "task"):
        if isinstance(message.get(name), str):
            known[name] = message[name]
    if role == "developer":
        tools = _objects(message, "tools")
        known["tools"] = tools and [_developer_tool(tool) for tool in tools]
    return known


def _content(message: Json, form: ContentFormat) -> str | list[Json]:
    parts = _parts(message["role"], message.get("content"))
    texts = [part[_TEXT_KEYS[part["type"]]] for part in parts]
    if form == "string":
        return "\n".join(text for text in texts if text)
    # Most templates know only text as the result of a tool; references to tools stay parts.
    if message["role"] == "tool" and all(part["type"] == "text" for part in parts):
        return "\n".join(texts)
    return parts


def _parts(role: str, content: object) -> list[Json]:
    if isinstance(content, str):
        content = [content]
    if not isinstance(content, list | None):
        raise cannot("render a chat", "text or a list of parts as content", content)
    typed = [{"type": "text", "text": it} if isinstance(it, str) else it for it in content or []]
    if role == "system":
        typed = list(_without_billing_header(typed))
    return [part for part in map(_part, typed) if part is not None]


def _without_billing_header(parts: Iterable[Any]) -> Iterator[Any]:
    for part in parts:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str) or not text.startswith(BILLING_HEADER):
            yield part
        elif rest := text.partition("\n")[2]:
            yield {**part, "text": rest}


def _part(part: object) -> Json | None:
    """Rebuild one part; None if it is text without text, which vLLM skips."""
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str) or kind not in _TEXT_KEYS:
        raise cannot("render a chat", "only text parts as content", kind or part)
    text = part.get(_TEXT_KEYS[kind])
    if not isinstance(text, str | None):
        raise cannot("render a chat", f"text in a part of type {kind!r}", text)
    if kind == "tool_reference":
        return {"type": kind, "name": text or ""}
    extras = {name: value for name, value in part.items() if name not in _PART_FIELDS}
    return None if text is None else {"type": "text", "text": text, **extras}


def _assistant_fields(message: Json) -> Json:
    known: Json = {}
    if calls := _objects(message, "tool_calls"):
        known["tool_calls"] = [_tool_call(call) for call in calls]
    reasoning = message.get("reasoning")
    reasoning = message.get("reasoning_content") if reasoning is None else reasoning
    if reasoning is not None:
        # Templates differ in the name that they read.
        known |= {"reasoning": reasoning, "reasoning_content": reasoning}
    return known


def _tool_call(call: Json) -> Json:
    function = _function_of(call)
    function = {**function, "arguments": _arguments(function.get("arguments"))}
    function = _ordered(function, "arguments", "name")
    return _ordered({**call, "function": function}, "id", "function", "type")


def _arguments(text: object) -> Json:
    """Parse the arguments of an earlier call; what is no JSON object becomes an empty one."""
    try:
        arguments = json.loads(text) if isinstance(text, str) else text
    except json.JSONDecodeError:
        return {}
    except (ValueError, RecursionError) as error:  # a number too long, lists too deep
        raise TokenizerError(f"cannot read the arguments of a tool call: {error}") from error
    return arguments if isinstance(arguments, dict) else {}


def _developer_tool(tool: Json) -> Json:
    function = _ordered(_function_of(tool), "name", "description", "parameters", "strict")
    return _ordered({**tool, "function": function}, "function", "type")


def _ordered(fields: Json, *first: str) -> Json:
    """Move the named fields to the front: templates print objects in the order of their fields."""
    return {**{name: fields[name] for name in first if name in fields}, **fields}


def developer_as_system(chat: list[Json]) -> list[Json]:
    """Replace the role `developer` and join all system messages into one at the front."""
    if all(message["role"] != "developer" for message in chat):
        return chat
    renamed = [_renamed(message) for message in chat]
    system = [message for message in renamed if message["role"] == "system"]
    if len(system) == 1 and renamed[0]["role"] == "system":
        return renamed
    texts = filter(None, (_joined(message["content"]) for message in system))
    merged = {"role": "system", "content": "\n\n".join(texts)}
    return [merged, *(message for message in renamed if message["role"] != "system")]


def _renamed(message: Json) -> Json:
    if message["role"] != "developer":
        return message
    return {**{k: v for k, v in message.items() if k != "tools"}, "role": "system"}


def _joined(content: str | list[Json]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content if "text" in part)
