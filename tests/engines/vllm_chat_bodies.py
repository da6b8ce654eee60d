"""What vLLM makes of bodies of other APIs; runs in vLLM's environment.

In:  on stdin, JSON: a list of {"kind", "body", "merges_system", "disabled_effort"}.
Out: on stdout, JSON: for each the body of a chat, or null where vLLM refuses it.
"""

import json
import sys

from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.utils import construct_input_messages, construct_tool_dicts


def chat_of(case):
    try:
        if case["kind"] == "messages":
            return chat_of_messages(case)
        return chat_of_responses(case["body"])
    except Exception as error:  # noqa: BLE001 - whatever it refuses with
        sys.stderr.write(f"{case['body']}: {error!r}\n")
        return None


def chat_of_messages(case):
    request = AnthropicServingMessages.to_chat_completion_request(
        AnthropicMessagesRequest(**case["body"]),
        merge_inline_system=case["merges_system"],
        disabled_thinking_effort=case["disabled_effort"],
    )
    names = ("messages", "tools", "reasoning_effort", "chat_template_kwargs")
    chat = request.model_dump(mode="json", exclude_unset=False)
    return {name: chat[name] for name in names if chat.get(name) is not None}


def chat_of_responses(body):
    request = ResponsesRequest(**body)
    messages = construct_input_messages(
        request_instructions=request.instructions, request_input=request.input
    )
    tools = construct_tool_dicts(request.tools, request.tool_choice)
    options = request.build_chat_params(None, "auto").chat_template_kwargs
    return {
        "messages": [json.loads(json.dumps(message)) for message in messages],
        **({"tools": tools} if tools else {}),
        "add_generation_prompt": options["add_generation_prompt"],
        "continue_final_message": options["continue_final_message"],
        "chat_template_kwargs": {k: v for k, v in options.items() if v is not None},
    }


json.dump([chat_of(case) for case in json.load(sys.stdin)], sys.stdout)
