"""The body of /v1/messages (Anthropic) to the chat that SGLang makes of it.

In:  a body; what is known of the template.   Out: the body of /v1/chat/completions.

messages_api.py is the same for vLLM. The facts were read in SGLang 0.5.23;
tests/engines/test_sglang_prompts.py asks an installed one. What depends on its --reasoning-parser
is taken to be as with most models: `<think>` begins a thought, and what switches thinking is the
variable that the template has.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from kvplug.tokenization.chat_messages import Json, cannot
from kvplug.tokenization.sglang_chat import objects, text_of

_ATTEMPT: Final = "read a /v1/messages body"
_ROLES: Final = ("user", "assistant", "system")


def chat_of_messages(
    body: Mapping[str, Any], *, inner_system: bool, variables: frozenset[str]
) -> Json:
    """`variables`: of the template; TokenizerError for what SGLang refuses."""
    given = objects(body.get("messages"), "messages")
    if any(message.get("role") not in _ROLES for message in given):
        raise cannot(_ATTEMPT, "messages of known roles", given)
    system = list(_system_texts(body.get("system")))
    if not inner_system:
        system += filter(None, (_inner_text(it) for it in given if it["role"] == "system"))
        given = [message for message in given if message["role"] != "system"]
    messages: list[Json] = []
    if system:
        messages.append({"role": "system", "content": "\n".join(system)})
    for message in given:
        _add_message(message, messages)
    chat: Json = {"model": body.get("model"), "messages": messages}
    options = _thinking(body.get("thinking"), variables)
    if effort := _effort(body.get("output_config")):
        options["reasoning_effort"] = effort  # here it does not switch thinking on
    chat["chat_template_kwargs"] = options
    choice = body.get("tool_choice") or {}
    if tools := [_tool(it) for it in objects(body.get("tools") or [], "tools") if _is_own(it)]:
        chat["tools"] = tools
        chat["tool_choice"] = _choice(choice)
    return chat


def _system_texts(system: object) -> Iterator[str]:
    if isinstance(system, str):
        yield from [system] if system.strip() else []
    else:
        blocks = objects(system or [], "system")
        yield from (it["text"] for it in blocks if it.get("type") == "text" and it.get("text"))


def _inner_text(message: Json) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content.strip()
    texts = (it.get("text") for it in objects(content, "content") if it.get("type") == "text")
    return "\n".join(filter(None, ((text or "").strip() for text in texts)))


def _thinking(asked: object, variables: frozenset[str]) -> Json:
    if not isinstance(asked, dict):
        return {}
    switches = [name for name in ("enable_thinking", "thinking") if name in variables]
    return {name: asked.get("type") != "disabled" for name in switches[:1]}


def _effort(config: object) -> str | None:
    effort = config.get("effort") if isinstance(config, dict) else None
    return "max" if effort == "xhigh" else effort


def _choice(choice: Json) -> str | Json:
    if choice.get("type") == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return "none" if choice.get("type") == "none" else "auto"


def _is_own(tool: Json) -> bool:
    """Not one that Anthropic's servers have."""
    return tool.get("type") in (None, "custom")


def _tool(tool: Json) -> Json:
    schema = tool.get("input_schema")
    if not isinstance(schema, dict):
        raise cannot(_ATTEMPT, "a tool with an input_schema", tool)
    function = {
        "name": tool.get("name"),
        "description": tool.get("description") or "",
        "parameters": schema if "type" in schema else {**schema, "type": "object"},
        "strict": bool(tool.get("strict", False)),
    }
    return {"type": "function", "function": function, "defer_loading": tool.get("defer_loading")}


def _add_message(message: Json, messages: list[Json]) -> None:
    """A user's message may become several: results of tools are messages of their own."""
    role, content = message["role"], message.get("content")
    if isinstance(content, str):
        messages.append({"role": role, "content": content})
    elif role == "user":
        _add_user(objects(content, "content"), messages)
    else:
        messages.append(_answer(role, objects(content, "content")))


def _add_user(blocks: list[Json], messages: list[Json]) -> None:
    parts: list[Json] = []
    for block in [*blocks, None]:
        is_result = block is not None and block.get("type") == "tool_result"
        if parts and (block is None or is_result):
            messages.append({"role": "user", "content": _plain(parts)})
            parts = []
        if block is not None and is_result:
            messages += _results(block)
        elif block is not None:
            parts += _parts(block)


def _answer(role: str, blocks: list[Json]) -> Json:
    parts = _thoughts(blocks) if role == "assistant" else []
    calls = [_use(block) for block in blocks if block.get("type") == "tool_use"]
    for block in blocks:
        if block.get("type") != "tool_use":
            parts += _parts(block)
    made: Json = {"role": role} | ({"tool_calls": calls} if calls else {})
    if parts or not calls:
        made["content"] = _plain(parts) if parts else ""
    return made


def _parts(block: Json) -> list[Json]:
    """Of a block that stays in its message."""
    match block.get("type"):
        case "text":
            return [{"type": "text", "text": text_of(block.get("text"))}]
        case "tool_result":
            text = "\n".join(part.get("text", "") for part in _result_parts(block))
            return [{"type": "text", "text": f"Tool result: {text}"}]
        case "thinking":
            return []
        case "image":
            return [block]  # which the router sees and SGLang writes in another way
        case kind:
            raise cannot(_ATTEMPT, "a known type of block", kind)


def _thoughts(blocks: list[Json]) -> list[Json]:
    thoughts = [it.get("thinking") for it in blocks if it.get("type") == "thinking"]
    text = "\n".join(text_of(it) for it in thoughts if it)
    return [{"type": "text", "text": f"<think>{text}\n</think>"}] if text else []


def _plain(parts: list[Json]) -> str | list[Json]:
    is_one = len(parts) == 1 and parts[0]["type"] == "text"
    return parts[0]["text"] if is_one else parts


def _use(block: Json) -> Json:
    function = {"name": block.get("name") or "", "arguments": json.dumps(block.get("input") or {})}
    return {"id": block.get("id"), "type": "function", "function": function}


def _result_parts(block: Json) -> list[Json]:
    content = block.get("content")
    if not isinstance(content, list):
        return [{"type": "text", "text": str(content)}] if content else []
    parts = []
    for item in objects(content, "content"):
        if item.get("type") == "text":
            parts += [{"type": "text", "text": item["text"]}] if item.get("text") else []
        elif item.get("type") == "tool_reference":
            name = item.get("tool_name") or item.get("name")
            parts.append({"type": "tool_reference", "name": name})
        else:
            raise cannot(_ATTEMPT, "text as the result of a tool", item)
    return parts


def _results(block: Json) -> Iterator[Json]:
    """One message of a tool for each run of texts, or of references."""
    groups: list[list[Json]] = []
    for part in _result_parts(block):
        if not groups or groups[-1][0]["type"] != part["type"]:
            groups.append([])
        groups[-1].append(part)
    call_id = block.get("tool_use_id") or block.get("id") or ""
    for content in [_plain(group) for group in groups] or [""]:
        yield {"role": "tool", "tool_call_id": call_id, "content": content}
