"""What SGLang makes of the messages, tools and options of a chat body before its template runs.

In:  the body of /v1/chat/completions.   Out: messages and options as the template gets them.

chat_messages.py is the same for vLLM. The facts were read in SGLang 0.5.23;
tests/engines/test_sglang_prompts.py asks an installed one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, NoReturn

from jinja2 import nodes

from kvplug.errors import TokenizerError
from kvplug.tokenization.chat_messages import RESERVED_OPTIONS, Json, cannot, flag
from kvplug.tokenization.content_format import ContentFormat, reads
from kvplug.tokenization.media import MARK

_ROLES: Final = ("system", "assistant", "tool", "function", "developer", "latest_reminder", "root")
_FIELDS: Final = ("tool_call_id", "name", "phase", "reasoning_content")
_EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "ultra", "max")
_FUNCTION_FIELDS: Final = ("description", "name", "parameters", "strict", "defer_loading")
# Of a template whose model may see or hear: it gets parts.
_SENSES: Final = ("image", "audio", "video", "vision")


def content_format(source: str, tree: nodes.Template) -> ContentFormat:
    """As SGLang guesses it: by words, and by loops over the content of `message`, `msg` or `m`."""
    if any(word in source for word in _SENSES):
        return "openai"
    loops = [loop.iter for loop in tree.find_all(nodes.For)]
    is_walked = any(reads(it, name, "content") for it in loops for name in ("message", "msg", "m"))
    return "openai" if is_walked else "string"


def options_of(body: Mapping[str, Any]) -> Json:
    """Collect what the template gets beside the messages; chat_template_kwargs win over fields."""
    given = body.get("chat_template_kwargs") or {}
    if not isinstance(given, dict):
        raise cannot("render a chat", "an object in chat_template_kwargs", given)
    if body.get("chat_template") is not None or "chat_template" in given:
        raise cannot("render a chat", "no chat_template in the request", "one")
    if reserved := RESERVED_OPTIONS & given.keys():
        raise cannot("render a chat", "only template variables", sorted(reserved))
    effort = _effort_of(body)
    options: Json = {"documents": None, "tools": _tools_of(body), "add_generation_prompt": True}
    if effort is not None:
        # Asking for an effort switches thinking on or off, unless the client does so itself.
        is_thinking = effort != "none"
        options |= {"thinking": is_thinking, "enable_thinking": is_thinking}
        options["reasoning_effort"] = effort
    return options | given


def _effort_of(body: Mapping[str, Any]) -> str | None:
    asked = body.get("reasoning")
    effort = asked.get("effort") if isinstance(asked, dict) else None
    effort = body.get("reasoning_effort") if effort is None else effort
    if effort is not None and effort not in _EFFORTS:
        raise cannot("render a chat", f"an effort of {', '.join(_EFFORTS)}", effort)
    return effort


def _tools_of(body: Mapping[str, Any]) -> list[Json] | None:
    tools, choice = body.get("tools"), body.get("tool_choice")
    if choice == "none" or not tools:
        return None
    found = [_tool(tool) for tool in objects(tools, "tools")]
    if isinstance(choice, dict):
        wanted = (choice.get("function") or {}).get("name")
        found = [tool for tool in found if tool["function"]["name"] == wanted]
    return found or None


def without_wrapper(tools: list[Json]) -> list[Json]:
    """Of templates that fail with tools as OpenAI has them: SGLang tries again with these."""
    return [tool["function"] for tool in tools]


def _tool(tool: Json) -> Json:
    """Rebuild a tool as SGLang's request model prints it: in the client's order of fields."""
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise cannot("render a chat", "a function with a name as tool", tool)
    deferred = tool.get("defer_loading")
    known = {name: function.get(name) for name in _FUNCTION_FIELDS}
    if known["defer_loading"] is None:
        known["defer_loading"] = deferred
    order = [*(name for name in function if name in known), *_FUNCTION_FIELDS]
    optional = ("strict", "defer_loading")
    rebuilt = {it: known[it] for it in order if it not in optional or known[it] is not None}
    kind = tool.get("type", "function")
    return {"type": kind, "function": rebuilt, "defer_loading": deferred}


def conversation(messages: object, form: ContentFormat) -> list[Json]:
    """Turn the messages of a body into new ones, as SGLang hands them to the template."""
    if not messages:
        raise cannot("render a chat", "a list with a message in 'messages'", messages)
    return [_message(message, form) for message in objects(messages, "messages")]


def _message(message: Json, form: ContentFormat) -> Json:
    role = message.get("role")
    if role == "user":
        if message.get("content") is None:
            raise cannot("render a chat", "a user's message with content", message)
        return {"role": role, "content": _content(message, form)}
    if not isinstance(role, str) or role.lower() not in _ROLES:
        raise cannot("render a chat", "a message of a known role", role)
    role = role.lower()
    known = {"role": role, "content": _content({**message, "role": role}, form)}
    known |= {name: message[name] for name in _FIELDS if message.get(name) is not None}
    if message.get("tool_calls") is not None:
        calls = objects(message["tool_calls"], "tool_calls")
        known["tool_calls"] = [_call(call, parses=role == "assistant") for call in calls]
    if message.get("tools") is not None:
        known["tools"] = [_tool(tool) for tool in objects(message["tools"], "tools")]
    if message.get("prefix") is not None:
        known["prefix"] = message["prefix"]
    if form == "openai" and isinstance(message.get("content"), list):
        known["content"] = known.pop("content")  # to the end, as templates print what they get
    return known


def _content(message: Json, form: ContentFormat) -> str | list[Json]:
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    parts = [it for it in map(_part, objects(content, "content")) if it is not None]
    texts = [part["text"] for part in parts if part["type"] == "text"]
    is_result = message["role"] == "tool" and len(texts) == len(parts)
    return " ".join(texts) if form == "string" or is_result else parts


def _part(part: Json) -> Json | None:
    """None for thinking, which reaches no template."""
    kind, text = part.get("type"), part.get("text")
    if kind == "text" and text == MARK:
        return part
    if kind == "text" and isinstance(text, str):
        return {"type": kind, "text": text}
    if kind == "tool_reference" and isinstance(part.get("name"), str):
        return {"type": kind, "name": part["name"]}
    if kind in ("thinking", "reasoning"):
        return None
    raise cannot("render a chat", "only text parts as content", kind or part)


def _call(call: Json, *, parses: bool) -> Json:
    function = call.get("function")
    if not isinstance(function, dict):
        raise cannot("render a chat", "a call of a function", call)
    arguments = function.get("arguments")
    if parses and isinstance(arguments, str):
        arguments = _arguments(arguments)
    return {
        "id": call.get("id"),
        "index": call.get("index"),
        "type": "function",
        "function": {"name": function.get("name"), "arguments": arguments},
    }


def _arguments(text: str) -> Json:
    try:
        arguments = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"cannot read the arguments of a tool call: {error}") from error
    if not isinstance(arguments, dict):
        raise cannot("read the arguments of a tool call", "a JSON object", arguments)
    return arguments


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def without_open_end(body: Mapping[str, Any], chat: list[Json]) -> tuple[list[Json], str]:
    """The chat, and a text that follows its prompt: the answer that the model shall go on with.

    An answer at the end that it shall not go on with becomes the user's.
    """
    last = chat[-1]
    if last["role"] != "assistant" or not isinstance(last["content"], str):
        return chat, ""
    if flag(body, "continue_final_message", False):
        return chat[:-1], last["content"]
    return [*chat[:-1], {"role": "user", "content": last["content"]}], ""


def text_of(value: object) -> str:
    """The same value, if it is a text."""
    if not isinstance(value, str):
        raise cannot("read the request", "a text", value)
    return value


def objects(value: object, name: str) -> list[Json]:
    """The same value, if it is a list of objects."""
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise cannot("read the request", f"a list of objects in {name!r}", value)
    return value
