"""A chat body to the one text that the engine tokenizes.

In:  the body of /v1/chat/completions; the chat templates (Jinja) of a model.
Out: the prompt text, as vLLM 0.32.0 with transformers 5.19.0 renders it; tests/tokenization/vectors
holds what it rendered.

What the template gets to see is made in chat_messages.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import jinja2
from jinja2 import meta

from kvplug.errors import TokenizerError
from kvplug.tokenization import sglang_chat
from kvplug.tokenization.chat_messages import (
    RESERVED_OPTIONS,
    Json,
    cannot,
    conversation,
    developer_as_system,
    options_of,
)
from kvplug.tokenization.content_format import ContentFormat, content_format
from kvplug.tokenization.media import MARK, common_length, marked, unmarked
from kvplug.tokenization.prompt_kind import Engine
from kvplug.tokenization.template_environment import (
    ENVIRONMENT,
    shows_inner_system,
    takes_inner_system,
)

_CONTINUE_HERE = "CONTINUE_FINAL_MESSAGE_TAG "
# Of Anthropic's API.
_EFFORTS = ("low", "medium", "high", "xhigh", "max")


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
        self.text = "\n".join([*sources.values(), without_tools or ""])
        """All of them: which tokens they write can be seen from it."""

    def render(self, body: Mapping[str, Any], special_tokens: Mapping[str, str]) -> str:
        """Render the prompt of a chat body; TokenizerError if the engine would refuse it, too."""
        template, options = self._prepare(body)
        return template.render(body.get("messages"), {**special_tokens, **options})

    def render_for_sglang(
        self, body: Mapping[str, Any], special_tokens: Mapping[str, str]
    ) -> tuple[str, str]:
        """As SGLang renders it, and a text that is tokenized by itself behind that."""
        template, options = self._prepare_for_sglang(body)
        return template.render_for_sglang(body, {**special_tokens, **options})

    def _prepare_for_sglang(self, body: Mapping[str, Any]) -> tuple[ChatTemplate, Json]:
        """It takes no other template where there are tools."""
        return self._choose(with_tools=False), sglang_chat.options_of(body)

    def render_before_media(
        self,
        body: Mapping[str, Any],
        special_tokens: Mapping[str, str],
        engine: Engine = Engine.VLLM,
    ) -> tuple[str, int]:
        """A text, and up to where the engine's is equal to it: as far as before the first picture.

        For a body with media.
        """
        prepare = self._prepare_for_sglang if engine is Engine.SGLANG else self._prepare
        template, options = prepare(body)
        options = {**special_tokens, **options}
        return template.render_before_media(body["messages"], options, engine)

    def _prepare(self, body: Mapping[str, Any]) -> tuple[ChatTemplate, Json]:
        options = options_of(body)
        if body.get("chat_template") is not None or "chat_template" in options:
            raise TokenizerError(
                "cannot render a chat: expected no chat_template in the request, got one; "
                "it is program text from outside and is not run"
            )
        if reserved := RESERVED_OPTIONS & options.keys():
            raise cannot("render a chat", "only template variables", sorted(reserved))
        return self._choose(with_tools=options["tools"] is not None), options

    @cached_property
    def merges_system(self) -> bool:
        """Whether vLLM moves system messages of a /v1/messages body to the front: where a template
        refuses them elsewhere, or needs more than vLLM gives it to find that out.
        """
        try:
            chosen = {self._choose(with_tools=either).source for either in (False, True)}
            return not all(map(takes_inner_system, chosen))
        except TokenizerError:
            return True

    @cached_property
    def shows_inner_system(self) -> bool:
        """Whether SGLang leaves system messages inside a conversation."""
        try:
            return shows_inner_system(self._choose(with_tools=False).source)
        except TokenizerError:
            return False

    @cached_property
    def variables(self) -> frozenset[str]:
        """What the template for bodies without tools reads."""
        try:
            return self._choose(with_tools=False).variables
        except TokenizerError:
            return frozenset()

    @cached_property
    def disabled_effort(self) -> str:
        """What vLLM takes for the reasoning_effort of thinking that is off: "low" where "none"
        fails or makes no difference.
        """
        off = self._probe("none")
        is_ignored = off is None or off in map(self._probe, _EFFORTS)
        return "low" if is_ignored else "none"

    def _probe(self, effort: str) -> str | None:
        body = {"messages": [{"role": "user", "content": "Hi"}], "reasoning_effort": effort}
        try:
            return self.render(body, {})
        except TokenizerError:
            return None

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
    sglang_format: ContentFormat
    variables: frozenset[str]
    compiled: jinja2.Template

    @classmethod
    def compile(cls, source: str) -> Self:
        """Compile the text; TokenizerError if it is no valid template."""
        try:
            tree = ENVIRONMENT.parse(source)
            variables = frozenset(meta.find_undeclared_variables(tree))
            forms = content_format(tree), sglang_chat.content_format(source, tree)
            return cls(source, *forms, variables, ENVIRONMENT.from_string(source))
        except (jinja2.TemplateError, SyntaxError) as error:
            raise TokenizerError(f"cannot compile the chat template: {error}") from error

    def render(self, messages: object, options: Json) -> str:
        """Render messages of a body; the options are the template's variables."""
        chat = self._conversation(messages)
        if not options.pop("continue_final_message"):
            return self._run(chat, options)
        if options["add_generation_prompt"]:
            raise TokenizerError(
                "cannot render a chat: expected add_generation_prompt or continue_final_message "
                "to be false, got true for both (the first is true by default)"
            )
        return self._run_open_ended(chat, options)

    def render_for_sglang(self, body: Mapping[str, Any], options: Json) -> tuple[str, str]:
        """A prompt, and what follows it."""
        chat = sglang_chat.conversation(body.get("messages"), self.sglang_format)
        chat, open_end = sglang_chat.without_open_end(body, chat)
        try:
            return self._run(chat, options), open_end
        except TokenizerError:
            if not options["tools"]:
                raise
            flat = sglang_chat.without_wrapper(options["tools"])
            return self._run(chat, {**options, "tools": flat}), open_end

    def render_before_media(
        self, messages: list[Json], options: Json, engine: Engine
    ) -> tuple[str, int]:
        """The text with the pictures in it, or with marks, and where it stops to be the engine's.

        Templates may put pictures in front of a message's text: so what counts is what the text
        with pictures and the text with marks have in common.
        """
        options.pop("continue_final_message", None)
        if engine is Engine.SGLANG:
            form = self.sglang_format
            chat = sglang_chat.conversation(marked(messages, form), form)
        else:
            form = self.content_format
            chat = self._conversation(marked(messages, form))
        text = self._run(chat, options)
        begin = text[: max(text.find(MARK), 0)]
        if form == "string":
            return text, len(begin)
        text = self._run(unmarked(chat), options)
        return text, common_length(text, begin)

    def _conversation(self, messages: object) -> list[Json]:
        chat = conversation(messages, self.content_format)
        if any(f"{quote}developer{quote}" in self.source for quote in "'\""):
            return chat
        return developer_as_system(chat)

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
            raise cannot("continue the final message", "it in the rendered chat", final)
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
    raise cannot("continue the final message", "text in it", message["content"])
