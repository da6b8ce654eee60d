"""A chat body to the one text that the engine tokenizes.

In:  the body of /v1/chat/completions; the chat templates (Jinja) of a model.
Out: the prompt text, as vLLM renders it.

A template never sees the body as the client sent it: vLLM validates it, drops what it does not
know, orders the fields and brings the content into the form that the template reads. One space of
difference is another block hash, so all of this is done here too. The facts were read in vLLM
0.32.0 and transformers 5.19.0; tests/server/vectors holds what those versions computed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from reprlib import repr as shortened
from typing import Any, Literal, NoReturn, Self

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvplug.errors import TokenizerError

ContentFormat = Literal["string", "openai"]
"""What `message.content` is inside a template: one string, or a list of typed parts."""

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
_RESERVED_OPTIONS = frozenset([
    "chat_template", "conversation", "max_length", "messages", "padding",
    "return_assistant_tokens_mask", "return_dict", "return_tensors", "self", "tokenize",
    "tokenizer_kwargs", "truncation",
])
# fmt: on
_UNSET = (None, "auto")
# Claude Code's attribution line differs in every request; vLLM drops it for the prefix cache.
_BILLING_HEADER = "x-anthropic-billing-header"
_CONTINUE_HERE = "CONTINUE_FINAL_MESSAGE_TAG "


def refusal(attempt: str, expected: str, got: object) -> TokenizerError:
    """Make the error whose sentence says what was attempted, what was expected and what came."""
    return TokenizerError(f"cannot {attempt}: expected {expected}, got {shortened(got)}")


def flag(body: Mapping[str, Any], name: str, default: bool) -> bool:
    """Read a true/false field of a body."""
    value = body.get(name, default)
    if not isinstance(value, bool):
        raise refusal("read the request", f"true or false in {name!r}", value)
    return value


class ChatTemplates:
    """The chat templates of one model."""

    def __init__(
        self, sources: Mapping[str, str], *, without_tools: str | None = None, if_none: str = ""
    ) -> None:
        """Compile the templates.

        sources:        by name; "tool_use" is taken for bodies with tools, "default" else.
        without_tools:  goes before `sources` for bodies without tools.
        if_none:        why there is no template, for the error.
        """
        self._named = {name: ChatTemplate.compile(text) for name, text in sources.items()}
        self._without_tools = None if without_tools is None else ChatTemplate.compile(without_tools)
        self._if_none = if_none or "the model has no default chat template"

    def render(self, body: Mapping[str, Any], special_tokens: Mapping[str, str]) -> str:
        """Render the prompt of a chat body; TokenizerError if the engine would refuse it, too."""
        options = _options(body)
        if body.get("chat_template") is not None or "chat_template" in options:
            raise TokenizerError(
                "cannot render a chat: expected no chat_template in the request, got one; "
                "it is program text from outside and is not run"
            )
        if reserved := _RESERVED_OPTIONS & options.keys():
            raise refusal("render a chat", "only template variables", sorted(reserved))
        template = self._choose(with_tools=options["tools"] is not None)
        return template.render(body.get("messages"), {**special_tokens, **options})

    def _choose(self, *, with_tools: bool) -> ChatTemplate:
        if self._without_tools is not None and not with_tools:
            return self._without_tools
        names = ("tool_use", "default") if with_tools else ("default",)
        for name in names:
            if name in self._named:
                return self._named[name]
        raise TokenizerError(f"cannot render a chat: {self._if_none}")


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """One compiled template and what was learnt from its text."""

    source: str
    content_format: ContentFormat
    variables: frozenset[str]
    compiled: jinja2.Template

    @classmethod
    def compile(cls, source: str) -> Self:
        """Compile the text; TokenizerError if it is no valid template."""
        try:
            tree = _ENVIRONMENT.parse(source)
            variables = frozenset(meta.find_undeclared_variables(tree))
            return cls(source, content_format(tree), variables, _ENVIRONMENT.from_string(source))
        except (jinja2.TemplateError, SyntaxError) as error:
            raise TokenizerError(f"cannot compile the chat template: {error}") from error

    def render(self, messages: object, options: Json) -> str:
        """Render messages of a body; the options are the template's variables."""
        chat = conversation(messages, self.content_format)
        if not any(f"{quote}developer{quote}" in self.source for quote in "'\""):
            chat = _developer_as_system(chat)
        if not options.pop("continue_final_message"):
            return self._run(chat, options)
        if options["add_generation_prompt"]:
            raise TokenizerError(
                "cannot render a chat: expected add_generation_prompt or continue_final_message "
                "to be false, got true for both (the first is true by default)"
            )
        return self._run_open_ended(chat, options)

    def _run(self, chat: list[Json], options: Json) -> str:
        always = ("tools", "documents", "add_generation_prompt")
        known = {name: options[name] for name in always}
        known |= {name: value for name, value in options.items() if name in self.variables}
        try:
            return self.compiled.render(messages=chat, **known)
        except Exception as error:
            # A template is a program: it can raise whatever Python can.
            raise TokenizerError(f"cannot render a chat: the template says {error}") from error

    def _run_open_ended(self, chat: list[Json], options: Json) -> str:
        """Render up to the end of the final message's text, which the model shall continue."""
        final = _mark_end(chat[-1])
        text = self._run(chat, options)
        mark = _CONTINUE_HERE.strip()
        if "content" not in self.source or final.strip() not in text or mark not in text:
            raise refusal("continue the final message", "it in the rendered chat", final)
        end = text.rindex(mark)
        # A template that trims messages took the mark's own space away: then trim the message too.
        is_trimmed = text[end : end + len(_CONTINUE_HERE)] != _CONTINUE_HERE
        return text[:end].rstrip() if is_trimmed else text[:end]


def _mark_end(message: Json) -> str:
    """Append the mark to the last text of the message; returns that text without it."""
    if isinstance(message["content"], str):
        message["content"] += _CONTINUE_HERE
        return str(message["content"].removesuffix(_CONTINUE_HERE))
    for part in reversed(message["content"]):
        if "text" in part:
            part["text"] += _CONTINUE_HERE
            return str(part["text"].removesuffix(_CONTINUE_HERE))
    raise refusal("continue the final message", "text in it", message["content"])


# --- what vLLM makes of a body ----------------------------------------------------------------


def _options(body: Mapping[str, Any]) -> Json:
    """Collect what the template gets beside the messages; fields win over chat_template_kwargs."""
    given = body.get("chat_template_kwargs") or {}
    if not isinstance(given, dict):
        raise refusal("render a chat", "an object in chat_template_kwargs", given)
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
        raise refusal("render a chat", f"a list of objects in {name!r}", value)
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
        raise refusal("render a chat", "a tool or a tool call of type 'function'", tool)
    return function


def conversation(messages: object, form: ContentFormat) -> list[Json]:
    """Turn the messages of a body into new ones, as vLLM hands them to the template."""
    if not isinstance(messages, list) or not messages:
        raise refusal("render a chat", "a list with a message in 'messages'", messages)
    return [_message(message, form) for message in messages]


def _message(message: object, form: ContentFormat) -> Json:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise refusal("render a chat", "an object with a role as message", message)
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
        raise refusal("render a chat", "text or a list of parts as content", content)
    typed = [{"type": "text", "text": it} if isinstance(it, str) else it for it in content or []]
    if role == "system":
        typed = list(_without_billing_header(typed))
    return [part for part in map(_part, typed) if part is not None]


def _without_billing_header(parts: Iterable[Any]) -> Iterator[Any]:
    for part in parts:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str) or not text.startswith(_BILLING_HEADER):
            yield part
        elif rest := text.partition("\n")[2]:
            yield {**part, "text": rest}


def _part(part: object) -> Json | None:
    """Rebuild one part; None if it is text without text, which vLLM skips."""
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str) or kind not in _TEXT_KEYS:
        raise refusal("render a chat", "only text parts as content", kind or part)
    text = part.get(_TEXT_KEYS[kind])
    if not isinstance(text, str | None):
        raise refusal("render a chat", f"text in a part of type {kind!r}", text)
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


def _developer_as_system(chat: list[Json]) -> list[Json]:
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


# --- which form of content a template reads ---------------------------------------------------


class _UnnamedTargetError(Exception):
    """A loop or an assignment of interest has a target that is no plain name."""


def content_format(tree: nodes.Template) -> ContentFormat:
    """Answer "openai" if the template loops over the content of a message, as vLLM guesses it.

    It is a guess from the text: `{% for part in message.content %}` says yes, and so does a loop
    over a macro's parameter that receives `message.content` somewhere.
    """
    try:
        messages = _message_names(tree)
        parameters = _macro_loops(tree, messages)
        for loop in tree.find_all(nodes.For):
            if _walks_content(loop, messages, parameters):
                _name(loop.target)
                return "openai"
    except _UnnamedTargetError:
        pass
    return "string"


def _message_names(tree: nodes.Template) -> list[str]:
    """Name the variables that loops over `messages`, or over an alias of it, give to a message."""
    aliases = ["messages"]
    for alias in aliases:  # grows while it is walked
        for assignment in tree.find_all(nodes.Assign):
            if _reads(assignment.node, alias) and _name(assignment.target) not in aliases:
                aliases.append(_name(assignment.target))
    loops = tree.find_all(nodes.For)
    return [_name(it.target) for it in loops if any(_reads(it.iter, alias) for alias in aliases)]


def _macro_loops(tree: nodes.Template, messages: list[str]) -> dict[int, set[str]]:
    """Map each loop inside a macro (its id) to the parameters that may hold a message's content."""
    parameters: dict[int, set[str]] = {}
    for macro in tree.find_all(nodes.Macro):
        found = _content_parameters(tree, macro, messages)
        for loop in macro.find_all(nodes.For):
            parameters[id(loop)] = found or parameters.get(id(loop), set())
    return parameters


def _content_parameters(tree: nodes.Template, macro: nodes.Macro, messages: list[str]) -> set[str]:
    names = [parameter.name for parameter in macro.args]
    found = set()
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and call.node.name == macro.name:
            given: list[tuple[str, nodes.Node]] = [*zip(names, call.args, strict=False)]
            given += [(pair.key, pair.value) for pair in call.kwargs if pair.key in names]
            found |= {name for name, value in given if _reads_content(value, messages)}
    return found


def _walks_content(loop: nodes.For, messages: list[str], parameters: dict[int, set[str]]) -> bool:
    if _reads_content(loop.iter, messages):
        return True
    # Outside of macros a variable called `content` is taken for the content of a message.
    names = parameters.get(id(loop), {"content"})
    return isinstance(loop.iter, nodes.Name) and loop.iter.name in names


def _reads_content(node: nodes.Node, messages: list[str]) -> bool:
    return any(_reads(node, message, "content") for message in messages)


def _reads(node: nodes.Node | None, name: str, field: str | None = None) -> bool:
    """Say whether the node is variable `name`, or its `field`: plain, filtered or sliced."""
    node = _unwrapped(node)
    if field is None:
        return _is_variable(node, name)
    if isinstance(node, nodes.Getattr):
        return node.attr == field and _is_variable(node.node, name)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
        return node.arg.value == field and _is_variable(node.node, name)
    return False


def _unwrapped(node: nodes.Node | None) -> nodes.Node | None:
    while True:
        if isinstance(node, nodes.Filter | nodes.Test) or (
            isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
        ):
            node = node.node
        else:
            return node


def _is_variable(node: nodes.Node | None, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name


def _name(target: nodes.Node) -> str:
    if not isinstance(target, nodes.Name):
        raise _UnnamedTargetError
    return target.name


# --- the environment --------------------------------------------------------------------------


class _Generation(Extension):
    """`{% generation %}` marks the assistant's part for training; here it only passes through."""

    tags = {"generation"}  # noqa: RUF012 - the form that jinja2 asks for

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_rendered"), [], [], body).set_lineno(line)

    def _rendered(self, caller: Callable[[], str]) -> str:
        return caller()


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Serialize without Jinja's HTML escapes; templates name the arguments."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    # Local time, as in the engine: both must run in the same time zone.
    return datetime.now().strftime(pattern)


def _new_environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


_ENVIRONMENT = _new_environment()
