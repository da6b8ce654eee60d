"""The body of /v1/responses to the chat that SGLang makes of it.

In:  a body; whether the template shows system messages inside a conversation.
Out: the body of /v1/chat/completions.

responses_api.py is the same for vLLM. The facts were read in SGLang 0.5.23;
tests/engines/test_sglang_prompts.py asks an installed one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from kvplug.tokenization.chat_messages import Json, cannot
from kvplug.tokenization.sglang_chat import objects, text_of

_ATTEMPT: Final = "read a /v1/responses body"
_PART_FIELDS: Final = ("id", "status", "type")
_NOT_IN_BODY: Final = ("previous_response_id", "conversation", "prompt")
_DEVELOPER: Final = "Developer instructions:"
_FREE_TEXT: Final = {
    "type": "object",
    "properties": {
        "input": {"type": "string", "description": "The freeform text payload for this tool."}
    },
    "required": ["input"],
    "additionalProperties": False,
}


def chat_of_responses(body: Mapping[str, Any], *, inner_system: bool) -> Json:
    """TokenizerError for what is not in the body, or has another form than known."""
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if absent := [name for name in _NOT_IN_BODY if body.get(name) is not None]:
        raise cannot(_ATTEMPT, "all of the prompt in it", absent)
    messages: list[Json] = []
    if body.get("instructions"):
        messages.append({"role": "system", "content": text_of(body["instructions"])})
    for item in objects(items, "input"):
        if (message := _message_of(item)) is not None:
            _join(message, messages)
    if not inner_system:
        messages = _system_first(messages)
    reasoning = body.get("reasoning")
    chat: Json = {
        "model": body.get("model"),
        "messages": messages,
        "reasoning_effort": reasoning.get("effort") if isinstance(reasoning, dict) else None,
        "chat_template_kwargs": body.get("chat_template_kwargs"),
    }
    if tools := list(_response_tools(objects(body.get("tools") or [], "tools"))):
        choice = body.get("tool_choice")
        chat["tools"] = tools
        name = choice.get("name") if isinstance(choice, dict) else None
        chat["tool_choice"] = {"function": {"name": name}} if name else choice
    return chat


def _message_of(item: Json) -> Json | None:
    match item.get("type") or "message":
        case "function_call":
            return _call_of(item, _object_text(item.get("arguments")))
        case "custom_tool_call":
            free_text = {"input": item.get("input") or ""}
            return _call_of(item, json.dumps(free_text, ensure_ascii=False))
        case "function_call_output" | "custom_tool_call_output":
            output = item.get("output", "")
            if isinstance(output, list):
                output = "".join(part.get("text", "") for part in objects(output, "output"))
            return {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
        case "reasoning":
            return _reasoning_of(item)
        case "message":
            return _said(item)
        case kind:
            raise cannot(_ATTEMPT, "a known type of item", kind)


def _said(item: Json) -> Json:
    content = item.get("content")
    if isinstance(content, list):
        content = [_response_part(part) for part in objects(content, "content")]
    made = {name: value for name, value in item.items() if name not in _PART_FIELDS}
    if item.get("role") == "developer":
        return {**made, "role": "system", "content": _labelled(content)}
    return {**made, "content": content}


def _response_part(part: Json) -> Json:
    if part.get("type") in ("input_text", "output_text", "text"):
        return {"type": "text", "text": part.get("text", "")}
    return part  # a picture, which the router sees, or what SGLang refuses


def _labelled(content: str | list[Json] | None) -> str | list[Json] | None:
    if isinstance(content, str):
        return f"{_DEVELOPER}\n{content}"
    if not content:
        return content if content is None else [{"type": "text", "text": _DEVELOPER}]
    first = {**content[0], "text": f"{_DEVELOPER}\n{text_of(content[0].get('text'))}"}
    return [first, *content[1:]]


def _call_of(item: Json, arguments: str) -> Json:
    function = {"name": item.get("name"), "arguments": arguments}
    call_id = item.get("call_id") or item.get("id")
    call = {"id": call_id, "type": "function", "function": function}
    return {"role": "assistant", "tool_calls": [call]}


def _object_text(arguments: object) -> str:
    """The text of a JSON object; of all else, that of an empty one."""
    if isinstance(arguments, dict):
        return json.dumps(arguments)
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) else None
    except (ValueError, RecursionError):
        parsed = None
    return str(arguments) if isinstance(parsed, dict) else "{}"


def _reasoning_of(item: Json) -> Json | None:
    for name in ("summary", "content"):
        parts = objects(item.get(name) or [], name)
        if texts := [part["text"] for part in parts if part.get("text")]:
            return {"role": "assistant", "reasoning_content": "\n".join(texts)}
    if item.get("encrypted_content"):
        raise cannot(_ATTEMPT, "reasoning as text", "encrypted_content")
    return None


def _join(message: Json, messages: list[Json]) -> None:
    """Messages of the assistant in a row are one."""
    last = messages[-1] if messages else {}
    if message.get("role") != "assistant" or last.get("role") != "assistant":
        messages.append(message)
        return
    if content := message.get("content"):
        before = last.get("content")
        last["content"] = _joined(before, content) if before else content
    if calls := message.get("tool_calls"):
        last["tool_calls"] = [*(last.get("tool_calls") or []), *calls]
    if thought := message.get("reasoning_content"):
        before = last.get("reasoning_content")
        last["reasoning_content"] = f"{before}\n{thought}" if before else thought


def _joined(before: str | list[Json], content: str | list[Json]) -> str | list[Json]:
    if isinstance(before, str) and isinstance(content, str):
        return f"{before}\n\n{content}"
    return [*_as_parts(before), *_as_parts(content)]


def _as_parts(content: str | list[Json]) -> list[Json]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _system_first(messages: list[Json]) -> list[Json]:
    """All system texts as one message in front."""
    texts: list[str] = []
    for message in messages:
        if message.get("role") == "system":
            content = message.get("content") or ""
            texts += [content] if isinstance(content, str) else [it["text"] for it in content]
    others = [message for message in messages if message.get("role") != "system"]
    return [{"role": "system", "content": "\n\n".join(texts)}, *others] if texts else others


def _response_tools(tools: list[Json]) -> Iterator[Json]:
    for tool in tools:
        description, parameters = tool.get("description"), tool.get("parameters")
        if tool.get("type") == "custom":
            description, parameters = _custom_description(tool), _FREE_TEXT
        elif tool.get("type") != "function":
            continue
        function = {
            "name": tool.get("name"),
            "description": description,
            "parameters": parameters,
            "strict": bool(tool.get("strict", False)),
        }
        yield {"type": "function", "function": function}


def _custom_description(tool: Json) -> str | None:
    form = tool.get("format")
    parts = [tool.get("description")]
    if isinstance(form, dict) and form.get("type") == "grammar":
        syntax, definition = form.get("syntax") or "lark", form.get("definition") or ""
        parts.append(f"The payload must conform to this {syntax} grammar:\n{definition}")
    return "\n\n".join(filter(None, parts)) or None
