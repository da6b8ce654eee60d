"""Bodies of /v1/messages and /v1/responses, of every form that changes a prompt."""

PARAMETERS = {"properties": {"city": {"type": "string"}}, "required": ["city"]}
TYPED = {"type": "object", **PARAMETERS}
USER = {"role": "user", "content": "hello"}
TEXT = {"type": "text", "text": "some text"}
BILLING = "x-anthropic-billing-header: cc_version=1; cch=abc\nthe rest"
TOOLS = [
    {"name": "weather", "description": "tells it", "input_schema": PARAMETERS},
    {"name": "time", "input_schema": TYPED, "strict": True, "cache_control": {"type": "ephemeral"}},
]
USE = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Zürich", "n": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "rain"}


def said(*content, role="user"):
    return {"role": role, "content": list(content)}


def answered(*content):
    return [said(USE, role="assistant"), said(*content)]


def removed(name, kind="tool_removal", **tool):
    tool = {"type": "tool_reference", "name": name, **tool}
    return said({"type": kind, "tool": tool}, role="system")


MESSAGES = {
    "text": {"messages": [USER]},
    "system": {"messages": [USER], "system": "be brief"},
    "system_blocks": {"messages": [USER], "system": [TEXT, {**TEXT, "text": BILLING}, TEXT]},
    "system_billing": {"messages": [USER], "system": BILLING},
    "system_empty": {"messages": [USER], "system": ""},
    "inner_system": {
        "messages": [USER, {"role": "system", "content": "now"}, said(TEXT, role="system"), USER]
    },
    "inner_billing": {"messages": [USER, {"role": "system", "content": BILLING}, USER]},
    "blocks": {"messages": [said(TEXT, {"type": "text", "text": ""}, TEXT)]},
    "empty": {"messages": [USER, said(), said({"type": "text", "text": ""})]},
    "cache_control": {"messages": [said({**TEXT, "cache_control": {"type": "ephemeral"}})]},
    "tools": {"messages": [USER], "tools": TOOLS},
    "no_tools": {"messages": [USER], "tools": []},
    "tool_choice": {"messages": [USER], "tools": TOOLS, "tool_choice": {"type": "none"}},
    "deferred": {"messages": [USER], "tools": [{**TOOLS[0], "defer_loading": True}]},
    "call": {"messages": [USER, *answered(RESULT)], "tools": TOOLS},
    "call_text": {"messages": [said(TEXT, USE, role="assistant"), said(RESULT, TEXT)]},
    "calls": {
        "messages": [
            said(USE, {**USE, "id": "toolu_2", "input": {}}, role="assistant"),
            said(RESULT, {**RESULT, "tool_use_id": "toolu_2"}),
        ]
    },
    "result_blocks": {"messages": answered({**RESULT, "content": [TEXT, TEXT]})},
    "result_empty": {"messages": answered({**RESULT, "content": None}, {**RESULT, "content": []})},
    "result_error": {"messages": answered({**RESULT, "is_error": True})},
    "result_reference": {
        "messages": answered(
            {**RESULT, "content": [{"type": "tool_reference", "tool_name": "time"}, TEXT]}
        )
    },
    "result_of_assistant": {"messages": [USER, said(RESULT, role="assistant")]},
    "thinking": {
        "messages": [
            USER,
            said({"type": "thinking", "thinking": "hm", "signature": "s"}, TEXT, role="assistant"),
            said({"type": "redacted_thinking", "data": "x"}, TEXT, role="assistant"),
            USER,
        ]
    },
    "thinking_only": {
        "messages": [said({"type": "thinking", "thinking": "hm"}, role="assistant"), USER]
    },
    "thinking_off": {"messages": [USER], "thinking": {"type": "disabled"}},
    "thinking_on": {"messages": [USER], "thinking": {"type": "enabled", "budget_tokens": 2048}},
    "effort": {"messages": [USER], "output_config": {"effort": "high"}},
    "kwargs": {"messages": [USER], "chat_template_kwargs": {"enable_thinking": False}},
    "removed": {"messages": [USER, removed("time")], "tools": TOOLS},
    "removed_again": {
        "messages": [removed("time"), removed("time", "tool_addition"), USER], "tools": TOOLS
    },
    "defined": {
        "messages": [
            USER,
            said(
                {
                    "type": "tool_addition",
                    "tool": {"type": "tool_definition", "definition": TOOLS[0]},
                },
                role="system",
            ),
        ]
    },
    "unknown_removed": {"messages": [USER, removed("nothing")], "tools": TOOLS},
    "unknown_block": {"messages": [said({"type": "video"})]},
    "unknown_role": {"messages": [{"role": "tool", "content": "x"}]},
    "no_schema": {"messages": [USER], "tools": [{"name": "x"}]},
}  # fmt: skip

FUNCTION = {"type": "function", "name": "weather", "parameters": TYPED, "strict": False}
CALL = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "é"}'}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "rain"}
THOUGHT = {
    "type": "reasoning",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "hm"}],
}
SAID = {
    "type": "message", "role": "assistant", "id": "m1", "status": "completed",
    "content": [{"type": "output_text", "text": "yes", "annotations": []}],
}  # fmt: skip
INPUT_TEXT = {"type": "input_text", "text": "some text"}

RESPONSES = {
    "text": {"input": "hello"},
    "instructions": {"input": "hello", "instructions": "be brief"},
    "items": {"input": [USER, {"role": "developer", "content": "d"}, {**USER, "type": "message"}]},
    "system_item": {"input": [{"role": "system", "content": "s"}, USER], "instructions": "first"},
    "parts": {"input": [said(INPUT_TEXT, INPUT_TEXT)]},
    "part_extra": {"input": [said({**INPUT_TEXT, "more": 1})]},
    "developer_tools": {"input": [{"role": "developer", "content": "d", "tools": [FUNCTION]}]},
    "custom_tool": {
        "input": "hello", "tools": [{"type": "custom", "name": "c", "description": "d"}]
    },
    "custom_call": {
        "input": [
            USER, {"type": "custom_tool_call", "call_id": "c1", "name": "c", "input": "x"},
            {"type": "custom_tool_call_output", "call_id": "c1", "output": "y"},
        ]
    },
    "name": {"input": [{**USER, "name": "bob"}]},
    "assistant": {"input": [USER, {"role": "assistant", "content": "yes"}, USER]},
    "output": {"input": [USER, SAID, USER]},
    "output_short": {
        "input": [
            USER,
            {
                "type": "message", "role": "assistant",
                "content": [{"type": "output_text", "text": "yes"}],
            },
            USER,
        ]
    },
    "outputs": {"input": [USER, SAID, SAID, USER]},
    "two_parts": {"input": [USER, {**SAID, "content": SAID["content"] * 2}, USER]},
    "call": {"input": [USER, CALL, OUTPUT], "tools": [FUNCTION]},
    "turn": {"input": [USER, THOUGHT, SAID, CALL, {**CALL, "call_id": "c2"}, OUTPUT, SAID, USER]},
    "thought_later": {"input": [USER, CALL, THOUGHT, OUTPUT, THOUGHT, THOUGHT, USER]},
    "summary": {
        "input": [USER, {**THOUGHT, "content": None, "summary": [
            {"type": "summary_text", "text": "short"}]}, SAID, USER]
    },
    "encrypted": {"input": [USER, {**THOUGHT, "encrypted_content": "x"}, USER]},
    "namespace": {
        "input": [USER, {**CALL, "namespace": "home"}, OUTPUT],
        "tools": [{"type": "namespace", "name": "home", "description": "d", "tools": [FUNCTION]}],
    },
    "tools": {
        "input": "hello",
        "tools": [{**FUNCTION, "description": "tells it", "strict": True}, FUNCTION],
    },
    "short_tool": {"input": "hello", "tools": [{"type": "function", "name": "weather"}]},
    "tool_choice": {"input": "hello", "tools": [FUNCTION], "tool_choice": "none"},
    "web_search": {"input": "hello", "tools": [{"type": "web_search_preview"}]},
    "output_parts": {"input": [USER, CALL, {**OUTPUT, "output": [INPUT_TEXT]}]},
    "effort": {"input": "hello", "reasoning": {"effort": "high"}},
    "no_effort": {"input": "hello", "reasoning": {"effort": "none"}},
    "kwargs": {"input": "hello", "chat_template_kwargs": {"enable_thinking": False}},
    "goes_on": {"input": [USER, {**SAID, "status": "incomplete"}]},
    "goes_on_short": {
        "input": [USER, {"role": "assistant", "content": "y", "status": "in_progress"}]
    },
    "unknown_item": {"input": [{"type": "nothing"}]},
    "chat_part": {"input": [said(TEXT)]},
}  # fmt: skip


def bodies():
    """Kind, name and body, with what both APIs require."""
    for name, body in MESSAGES.items():
        yield "messages", name, {"model": "m", "max_tokens": 4096, **body}
    for name, body in RESPONSES.items():
        yield "responses", name, {"model": "m", **body}
