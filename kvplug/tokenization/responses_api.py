"""A body of OpenAI's /v1/responses to the chat body that vLLM 0.32.0 makes of it.

In:  the body of /v1/responses.
Out: a body of /v1/chat/completions, as far as its prompt goes.

What continues an earlier response (`previous_response_id`) has most of its prompt in the engine's
memory and none of it in the body. Read in vllm/entrypoints/openai/responses/utils.py;
tests/tokenization/vectors/other_apis.json holds what it made of bodies.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from kvplug.tokenization.chat_messages import Json, cannot, object_list, text_in

_ATTEMPT: Final = "read a /v1/responses body"
_objects, _text = partial(object_list, _ATTEMPT), partial(text_in, _ATTEMPT)
_ENGINES_OWN: Final = ("previous_response_id", "prompt", "conversation")
_OPEN: Final = ("in_progress", "incomplete")
# A tool that takes a text is shown to the model as a function with one.
_FREE_TEXT: Final[Json] = {
    "type": "object",
    "properties": {
        "input": {"type": "string", "description": "The freeform text payload for this tool."}
    },
    "required": ["input"],
    "additionalProperties": False,
}
_PART_TYPES: Final = ("input_text", "input_image", "input_file", "input_audio")


def chat_of_responses(body: Mapping[str, Any]) -> dict[str, Any]:
    """The chat body; TokenizerError for a body whose prompt is not in it."""
    for name in _ENGINES_OWN:
        if body.get(name) is not None:
            raise cannot(_ATTEMPT, f"all of the prompt in it, without {name!r}", body[name])
    messages: list[Json] = []
    if instructions := body.get("instructions"):
        messages.append({"role": "system", "content": _text(instructions, "instructions")})
    given = body.get("input")
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    else:
        for item in _objects(given, "input"):
            _add_item(item, messages)
    goes_on = _goes_on(given)
    reasoning = body.get("reasoning")
    chat = {
        "model": body.get("model"),
        "messages": messages,
        "add_generation_prompt": not goes_on,
        "continue_final_message": goes_on,
        # Of a chat the template alone writes special tokens; here the tokenizer adds its own, too.
        "add_special_tokens": True,
        "reasoning_effort": reasoning.get("effort") if isinstance(reasoning, dict) else None,
        "chat_template_kwargs": body.get("chat_template_kwargs"),
    }
    if tools := _tools(body.get("tools") or []):
        chat["tools"] = tools
    return chat


def _goes_on(items: object) -> bool:
    """Whether the last item is a message that the model shall go on with."""
    if not isinstance(items, list) or not items:
        return False
    last = items[-1]
    return last.get("type", "message") in ("message", "reasoning") and last.get("status") in _OPEN


def _add_item(item: Json, messages: list[Json]) -> None:
    """Several items may make one message of the assistant: reasoning, a text, calls."""
    match item.get("type", "message"), item.get("role"):
        case "function_call", _:
            _add_call(item, item.get("arguments"), messages)
        case "custom_tool_call", _:
            arguments = json.dumps({"input": item.get("input") or ""}, ensure_ascii=False)
            _add_call(item, arguments, messages)
        case "reasoning", _:
            _add_to_assistant("reasoning", _reasoning(item), messages)
        case (("function_call_output" | "custom_tool_call_output"), _):
            content = _content(item.get("output"))
            call_id = item.get("call_id")
            messages.append({"role": "tool", "content": content, "tool_call_id": call_id})
        case "message", "assistant":
            _add_to_assistant("content", _first_text(item.get("content")), messages)
        case "message", ("user" | "system" | "developer") as role:
            messages.append({**item, "role": role, "content": _content(item.get("content"))})
        case kind, role:
            raise cannot(_ATTEMPT, "a known type of item", (kind, role))


def _add_to_assistant(field: str, text: str, messages: list[Json]) -> None:
    """To the last message, if it is the assistant's and has none of this yet."""
    last = messages[-1] if messages else {}
    if last.get("role") == "assistant" and last.get(field) is None:
        last[field] = text
    else:
        messages.append({"role": "assistant", field: text})


def _add_call(item: Json, arguments: object, messages: list[Json]) -> None:
    name = _text(item.get("name"), "name")
    if namespace := item.get("namespace"):
        name = f"{namespace}__{name}"
    function = {"name": name, "arguments": _text(arguments, "arguments")}
    call = {"id": _text(item.get("call_id"), "call_id"), "type": "function", "function": function}
    if messages and messages[-1]["role"] == "assistant":
        messages[-1].setdefault("tool_calls", []).append(call)
    else:
        messages.append({"role": "assistant", "tool_calls": [call]})


def _reasoning(item: Json) -> str:
    if item.get("encrypted_content"):
        raise cannot(_ATTEMPT, "reasoning as text", "encrypted_content")
    for name in ("content", "summary"):
        if parts := _objects(item.get(name) or [], name):
            return _text(parts[0].get("text"), "text")
    return ""


def _first_text(content: object) -> str:
    if isinstance(content, str):
        return content
    parts = _objects(content, "content")
    if not parts:
        raise cannot(_ATTEMPT, "a text in a message of the assistant", content)
    return _text(parts[0].get("text"), "text")


def _content(content: object) -> str | list[Json]:
    """A text, or parts of the types that the engine takes."""
    if isinstance(content, str):
        return content
    parts = _objects(content, "content")
    for part in parts:
        if part.get("type") not in _PART_TYPES:
            raise cannot(_ATTEMPT, f"parts of the types {', '.join(_PART_TYPES)}", part)
    return parts


def _tools(tools: object) -> list[Json]:
    """Functions, alone and in namespaces, and tools that take a text; no others are shown."""
    found: list[Json] = []
    for tool in _objects(tools, "tools"):
        if tool.get("type") == "function":
            found.append(_function(tool, ""))
        elif tool.get("type") == "namespace":
            inner = _objects(tool.get("tools"), "tools")
            found += [_function(it, f"{tool.get('name')}__") for it in inner if _is_function(it)]
        elif tool.get("type") == "custom":
            found.append(_function({**tool, "parameters": _FREE_TEXT}, ""))
    return found


def _is_function(tool: Json) -> bool:
    return tool.get("type") == "function"


def _function(tool: Json, prefix: str) -> Json:
    names = ("description", "parameters", "strict", "defer_loading")
    function = {"name": prefix + _text(tool.get("name"), "name")}
    return {"type": "function", "function": function | {name: tool.get(name) for name in names}}
