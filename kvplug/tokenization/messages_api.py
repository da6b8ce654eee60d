"""A body of Anthropic's /v1/messages to the chat body that vLLM 0.32.0 makes of it.

In:  the body of /v1/messages; two facts about the model's templates.
Out: a body of /v1/chat/completions, as far as its prompt goes.

Read in vllm/entrypoints/anthropic/serving.py; tests/tokenization/vectors/other_apis.json holds
what it made of bodies.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Final

from kvplug.tokenization.chat_messages import BILLING_HEADER, Json, cannot, object_list, text_in

_ATTEMPT: Final = "read a /v1/messages body"
_objects, _text = partial(object_list, _ATTEMPT), partial(text_in, _ATTEMPT)
_IGNORED: Final = ("redacted_thinking", "tool_reference")


def chat_of_messages(
    body: Mapping[str, Any], *, merges_system: bool, disabled_effort: str
) -> dict[str, Any]:
    """The chat body.

    merges_system: system messages inside the conversation go to its front, as the template wants
    none elsewhere; disabled_effort: the reasoning_effort that stands for thinking that is off.
    """
    items = _objects(body.get("messages"), "messages")
    chat: Json = {
        "model": body.get("model"),
        "messages": [*_system(body.get("system"), items if merges_system else [])],
        "chat_template_kwargs": body.get("chat_template_kwargs"),
    }
    for item in items:
        if item.get("role") != "system":
            chat["messages"] += _messages_of(item)
        elif not merges_system and (text := _system_text(item.get("content"))):
            chat["messages"].append({"role": "system", "content": text})
    chat["reasoning_effort"] = _effort(body, disabled_effort)
    if (tools := _tools_in_effect(body, items)) is not None:
        chat["tools"] = [_tool(tool) for tool in tools]
    return chat


def _system(system: object, merged: list[Json]) -> Iterable[Json]:
    texts = [_system_text(system) if isinstance(system, list) else system]
    texts += [_system_text(item.get("content")) for item in merged if item.get("role") == "system"]
    present = [_text(text, "system") for text in texts if text]
    return [{"role": "system", "content": "".join(present)}] if present else []


def _system_text(content: object) -> str | None:
    """Without Claude Code's attribution line, which differs in every request."""
    if isinstance(content, str):
        return None if content.startswith(BILLING_HEADER) else content
    texts = [
        _text(block["text"], "text")
        for block in _objects(content, "content")
        if block.get("type") == "text" and block.get("text")
    ]
    return "".join(text for text in texts if not text.startswith(BILLING_HEADER)) or None


def _messages_of(item: Json) -> list[Json]:
    """One message, behind the results of tools that are in it."""
    role, content = item.get("role"), item.get("content")
    if role not in ("user", "assistant"):
        raise cannot(_ATTEMPT, "the role user, assistant or system", role)
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    message: Json = {"role": role}
    results: list[Json] = []
    parts: list[Json] = []
    for block in _objects(content, "content"):
        _add_block(block, message, parts, results)
    if parts:
        is_text = len(parts) == 1 and parts[0]["type"] == "text"
        message["content"] = parts[0]["text"] if is_text else parts
    is_empty = role == "user" and "content" not in message
    return results if is_empty else [*results, message]


def _add_block(block: Json, message: Json, parts: list[Json], results: list[Json]) -> None:
    match block.get("type"):
        case "text" | "image":
            parts += _parts(block)
        case "thinking":
            if (thinking := block.get("thinking")) is not None:
                known = message.get("reasoning", "")
                message["reasoning"] = known + _text(thinking, "thinking")
        case "tool_use":
            message.setdefault("tool_calls", []).append(_call(block))
        case "tool_result" if message["role"] == "user":
            results += _results(block)
        case "tool_result":
            text = f"Tool result: {block.get('content') or ''}"
            parts.append({"type": "text", "text": text})
        case kind if kind not in _IGNORED:
            raise cannot(_ATTEMPT, "a known type of block", kind)


def _parts(block: Json) -> list[Json]:
    if block["type"] == "image":
        source = block.get("source")
        return [{"type": "image_url", "image_url": source}] if source else []
    text = block.get("text")
    return [{"type": "text", "text": _text(text, "text")}] if text else []


def _call(block: Json) -> Json:
    if not block.get("id"):
        raise cannot(_ATTEMPT, "an id of a tool_use block", block)  # the engine would make one up
    function = {"name": block.get("name") or "", "arguments": block.get("input") or {}}
    return {"id": block["id"], "type": "function", "function": function}


def _results(block: Json) -> list[Json]:
    """The messages of one tool result: its text, its pictures, the tools that it names."""
    content = block.get("content")
    items = [it for it in content if isinstance(it, dict)] if isinstance(content, list) else []
    texts = [_text(it.get("text", ""), "text") for it in items if it.get("type") == "text"]
    answer = content if isinstance(content, str) else "\n".join(texts)
    head = {"role": "tool", "tool_call_id": block.get("tool_use_id") or ""}
    found: list[Json] = [{**head, "content": answer}]
    pictures = [it for it in items if it.get("type") == "image"]
    if pictures:
        shown = [{"type": "image_url", "image_url": it.get("source")} for it in pictures]
        found.append({"role": "user", "content": shown})
    names = [
        it.get("tool_name") or it.get("name") for it in items if it.get("type") == "tool_reference"
    ]
    if any(names):
        named = [{"type": "tool_reference", "name": name} for name in names if name]
        found.append({**head, "content": named})
    return found


def _effort(body: Mapping[str, Any], disabled_effort: str) -> str | None:
    thinking = body.get("thinking")
    if isinstance(thinking, dict) and thinking.get("type") == "disabled":
        return disabled_effort
    output = body.get("output_config")
    return output.get("effort") if isinstance(output, dict) else None


def _tools_in_effect(body: Mapping[str, Any], items: list[Json]) -> list[Json] | None:
    """The tools at the end of the conversation, which may have added and removed some."""
    given = body.get("tools")
    listed = None if given is None else _objects(given, "tools")
    contents = [it["content"] for it in items if isinstance(it.get("content"), list)]
    changes = [
        block
        for content in contents
        for block in _objects(content, "content")
        if block.get("type") in ("tool_addition", "tool_removal")
    ]
    if not changes:
        return listed
    tools = {tool.get("name"): tool for tool in listed or []}
    removed: set[object] = set()
    for block in changes:
        change = block.get("tool")
        if not isinstance(change, dict):
            raise cannot(_ATTEMPT, "a tool in a change of tools", change)
        _change(change, block["type"] == "tool_addition", tools, removed)
    return [tool for name, tool in tools.items() if name not in removed]


def _change(change: Json, is_added: bool, tools: dict[object, Json], removed: set[object]) -> None:
    defined = change.get("definition")
    name = defined.get("name") if isinstance(defined, dict) else change.get("name")
    if isinstance(defined, dict):
        tools[name] = defined
    elif name not in tools:
        raise cannot(_ATTEMPT, "a tool that is declared in 'tools'", name)
    elif is_added:
        tools[name] = {**tools[name], "defer_loading": None}
    removed.discard(name) if is_added else removed.add(name)


def _tool(tool: Json) -> Json:
    schema = tool.get("input_schema")
    if not isinstance(schema, dict):
        raise cannot(_ATTEMPT, "an object in 'input_schema'", schema)
    function = {name: tool.get(name) for name in ("name", "description", "strict", "defer_loading")}
    parameters = schema if "type" in schema else {**schema, "type": "object"}
    return {"type": "function", "function": {**function, "parameters": parameters}}
