import json
from datetime import datetime
from pathlib import Path

import jinja2
import pytest

from kvplug.errors import TokenizerError
from kvplug.tokenization.chat_template import ChatTemplate, ChatTemplates

VECTORS = Path(__file__).parent / "vectors"
FAMILIES = ["chatml", "llama", "mistral", "dump", "dump_parts"]
SPECIAL_TOKENS = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>"}
USER = {"role": "user", "content": "q"}


def cases():
    for family in FAMILIES:
        vectors = json.loads((VECTORS / f"{family}.json").read_text(encoding="utf-8"))
        source = vectors["files"]["tokenizer_config.json"]["chat_template"]
        for case in vectors["chat"]:
            yield pytest.param(source, case, id=f"{family}-{case['name']}")


def render(source, *messages, special_tokens=None, **body):
    templates = ChatTemplates({"default": source})
    return templates.render({"messages": [*messages] or [USER], **body}, special_tokens or {})


@pytest.mark.parametrize(("source", "case"), list(cases()))
def test_text_is_that_of_vllm(source, case):
    special_tokens = {} if "bos_token" not in source else SPECIAL_TOKENS
    text = ChatTemplates({"default": source}).render(case["body"], special_tokens)
    assert text == case["text"]


# --- which form of content a template reads (the guess of vLLM 0.32.0) -------------------------

OPENAI, STRING = "openai", "string"
MACRO = "{% macro show(it) %}{% for part in it %}{% endfor %}{% endmacro %}"


def over_messages(inner, messages="messages"):
    return "{% for m in " + messages + " %}" + inner + "{% endfor %}"


def over(parts, target="part"):
    return over_messages("{% for " + target + " in " + parts + " %}{% endfor %}")


@pytest.mark.parametrize(
    ("source", "content_format"),
    [
        ("{{ messages }}", STRING),
        (over_messages("{{ m.content }}"), STRING),
        (over("m.content"), OPENAI),
        (over("m['content'] | list"), OPENAI),
        (over("m.content[1:]"), OPENAI),
        (over("m.parts"), STRING),
        (over("m[0]"), STRING),
        (over("m.content", target="a, b"), STRING),
        (over("content"), OPENAI),
        ("{% generation %}" + over("m.content") + "{% endgeneration %}", OPENAI),
        ("{% set all = messages[1:] %}" + over("m.content").replace("messages", "all"), OPENAI),
        ("{% set it.all = messages %}" + over("m.content"), STRING),
        (over_messages("", "messages | list").replace("m in", "i, m in") + over("content"), STRING),
        (MACRO + over_messages("{{ show(m.content) }}"), OPENAI),
        (MACRO + over_messages("{{ show(it=m.content) }}"), OPENAI),
        (MACRO + over_messages("{{ show(m.role) }}"), STRING),
        (MACRO.replace("it", "content") + over_messages(""), STRING),
    ],
)
def test_form_of_content(source, content_format):
    assert ChatTemplate.compile(source).content_format == content_format


@pytest.mark.timeout(5)
def test_variables_that_are_set_from_each_other_end_the_search():
    source = "{% set a = messages %}{% set b = a %}{% set a = b %}"
    assert ChatTemplate.compile(source).content_format == "string"


# --- what templates find ----------------------------------------------------------------------


def test_tojson_keeps_letters_and_signs_and_takes_the_arguments_of_json():
    shown = render("{{ messages[0].content | tojson }}", {"role": "user", "content": "<é'&>"})
    assert shown == '"<é\'&>"'
    source = "{{ {'b': [1], 'a': 'é'} | tojson(ensure_ascii=True, sort_keys=True, indent=1) }}"
    assert render(source) == '{\n "a": "\\u00e9",\n "b": [\n  1\n ]\n}'


def test_blocks_are_trimmed_and_loops_can_break():
    loop = (
        "{%- for i in [1, 2] %}\n    {% if i == 2 %}{% break %}{% endif %}\n{{ i }}\n  {% endfor %}"
    )
    source = "  \n" + loop
    assert render(source) == "1\n"


def test_generation_tags_pass_through():
    assert render("a{% generation %}{{ messages[0].content }}{% endgeneration %}b") == "aqb"


def test_strftime_now_is_local_time():
    before, shown, after = datetime.now(), render("{{ strftime_now('%Y-%m-%d') }}"), datetime.now()
    assert before.strftime("%Y-%m-%d") <= shown <= after.strftime("%Y-%m-%d")


def test_fields_go_before_chat_template_kwargs_and_these_before_special_tokens():
    source = "{{ bos_token }} {{ eos_token }} {{ add_generation_prompt }} {{ range is callable }}"
    kwargs = {"bos_token": "B", "eos_token": None, "add_generation_prompt": False, "range": 1}
    shown = render(source, special_tokens=SPECIAL_TOKENS, chat_template_kwargs=kwargs)
    assert shown == "B <|eos|> True True"


# --- templates are programs -------------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(x=1) }}",
        "{{ range(1000000) | list }}",
        "{{ 1 / 0 }}",
        "{{ messages[7].content }}",
        "{{ 1 + 'a' }}",
    ],
)
def test_what_a_template_must_not_do_is_a_tokenizer_error(source):
    with pytest.raises(TokenizerError, match="cannot render a chat: the template says"):
        render(source)


def test_the_template_s_own_reason_is_told():
    with pytest.raises(TokenizerError, match="the template says roles must alternate") as caught:
        render("{{ raise_exception('roles must alternate') }}")
    assert isinstance(caught.value.__cause__, jinja2.TemplateError)


@pytest.mark.parametrize("source", ["{% if %}", "{{ x | nofilter }}", "{% break %}", "{% for %}"])
def test_a_template_that_does_not_compile(source):
    with pytest.raises(TokenizerError, match=r"^cannot compile the chat template: "):
        ChatTemplates({"default": source})


@pytest.mark.parametrize(
    "body", [{"chat_template": "{{ 1 }}"}, {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}]
)
def test_a_template_in_the_request_is_not_run(body):
    with pytest.raises(TokenizerError, match="program text from outside and is not run"):
        render("{{ messages }}", **body)


# --- choosing ---------------------------------------------------------------------------------

TOOLS = [{"type": "function", "function": {"name": "f"}}]


def test_tool_use_is_for_bodies_with_tools():
    templates = ChatTemplates({"default": "plain", "tool_use": "tools"})
    assert templates.render({"messages": [USER]}, {}) == "plain"
    assert templates.render({"messages": [USER], "tools": TOOLS}, {}) == "tools"
    assert templates.render({"messages": [USER], "tools": None}, {}) == "plain"


def test_no_template_says_why():
    with pytest.raises(TokenizerError, match="no default"):
        ChatTemplates({"rag": "x"}).render({"messages": [USER]}, {})
    with pytest.raises(TokenizerError, match="because of me"):
        ChatTemplates({}, if_none="because of me").render({"messages": [USER]}, {})


# --- messages ---------------------------------------------------------------------------------


def chat(content, **message):
    return {"messages": [{"role": "assistant", "content": content, **message}]}


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({"messages": None}, "a list with a message in 'messages', got None"),
        ({"messages": []}, r"a list with a message in 'messages', got \[\]"),
        ({"messages": ["hi"]}, "an object with a role as message, got 'hi'"),
        ({"messages": [{"content": "hi"}]}, "an object with a role"),
        (chat(5), "text or a list of parts as content, got 5"),
        (chat([5]), "only text parts as content, got 5"),
        (chat([{"type": ["x"]}]), "only text parts"),
        (chat([{"type": "image_url"}]), "only text parts as content, got 'image_url'"),
        (chat([{"type": "text", "text": 5}]), "text in a part of type 'text', got 5"),
        (chat("", tool_calls="x"), "a list of objects in 'tool_calls', got 'x'"),
        (chat("", tool_calls=[{"type": "custom"}]), "a tool call of type 'function'"),
        (chat("", role="developer", tools=5), "a list of objects in 'tools', got 5"),
        (chat("x") | {"tools": ["x"]}, "a list of objects in 'tools'"),
        (chat("x") | {"tools": [{"type": "function"}]}, "a tool or a tool call of type 'function'"),
        (chat("x") | {"documents": "x"}, "a list of objects in 'documents'"),
        (chat("x") | {"chat_template_kwargs": "x"}, "an object in chat_template_kwargs"),
        (chat("x") | {"chat_template_kwargs": {"self": 1}}, "only template variables"),
        (chat("x") | {"add_generation_prompt": "no"}, "true or false in 'add_generation_prompt'"),
    ],
)
def test_a_body_of_a_wrong_kind_is_rejected_in_a_sentence(body, sentence):
    with pytest.raises(TokenizerError, match=rf"^cannot .*: expected .*{sentence}"):
        ChatTemplates({"default": "{{ messages }}"}).render(body, {})


@pytest.mark.parametrize(
    ("arguments", "parsed"),
    [('{"a": 1}', {"a": 1}), ("", {}), ("[1]", {}), ("{", {}), ({"a": 1}, {"a": 1}), (None, {})],
)
def test_arguments_of_earlier_calls_become_objects(arguments, parsed):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    shown = render(
        "{{ messages[0].tool_calls[0].function.arguments | tojson }}",
        {"role": "assistant", "content": None, "tool_calls": [call]},
    )
    assert json.loads(shown) == parsed


@pytest.mark.parametrize("arguments", ["[" * 100_000, "1" * 10_000])
def test_arguments_that_cannot_be_parsed_at_all(arguments):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    with pytest.raises(TokenizerError, match="arguments of a tool call"):
        render("x", {"role": "assistant", "tool_calls": [call]})


CONTENTS = "{% for m in messages %}<{{ m.content X}}>{% endfor %}"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (CONTENTS.replace("X", ""), "<q><The answer  "),  # kept as it is
        (CONTENTS.replace("X", "| trim "), "<q><The answer"),  # trimmed as the template does
    ],
)
def test_the_final_message_can_be_left_open(source, text):
    final = {"role": "assistant", "content": "The answer  "}
    options = {"continue_final_message": True, "add_generation_prompt": False}
    assert render(source, USER, final, **options) == text


@pytest.mark.parametrize(
    ("source", "content"),
    [
        ("{{ messages[0].content }}", "a"),
        ("{{ messages[-1]['con' ~ 'tent'] }}", "a"),
        ("{% for m in messages %}{% for c in m.content %}{{ c.text }}{% endfor %}{% endfor %}", []),
    ],
)
def test_a_final_message_that_is_not_shown_cannot_be_left_open(source, content):
    options = {"continue_final_message": True, "add_generation_prompt": False}
    with pytest.raises(TokenizerError, match="cannot continue the final message"):
        render(source, USER, {"role": "assistant", "content": content}, **options)
