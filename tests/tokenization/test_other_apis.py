"""/v1/messages and /v1/responses become the chats that vLLM makes of them."""

import json

import pytest

from kvplug.errors import TokenizerError
from kvplug.tokenization.chat_template import ChatTemplates
from kvplug.tokenization.messages_api import chat_of_messages
from kvplug.tokenization.responses_api import chat_of_responses
from tests.tokenization.conftest import VECTORS
from tests.tokenization.other_apis import bodies

CASES = json.loads((VECTORS / "apis" / "other_apis.json").read_text(encoding="utf-8"))["cases"]
TEMPLATES = ["dump", "dump_parts", "chatml", "llama"]


def templates(family):
    vectors = json.loads((VECTORS / f"{family}.json").read_text(encoding="utf-8"))
    return ChatTemplates({"default": vectors["files"]["tokenizer_config.json"]["chat_template"]})


def rendered(family, chat):
    """The text, or that the template refuses the chat."""
    try:
        return templates(family).render(chat, {})
    except TokenizerError as error:
        return str(error)


def ours(case):
    if case["kind"] == "responses":
        return chat_of_responses(case["body"])
    options = {name: case[name] for name in ("merges_system", "disabled_effort")}
    return chat_of_messages(case["body"], **options)


def name_of(case):
    return f"{case['kind']}-{case['name']}-{'merged' if case['merges_system'] else 'kept'}"


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_the_prompt_is_that_of_vllm(case):
    if case["chat"] is None:
        with pytest.raises(TokenizerError, match=f"cannot read a /v1/{case['kind']} body: "):
            ours(case)
        return
    before = json.dumps(case["body"])
    chat = ours(case)
    for family in TEMPLATES:
        assert rendered(family, chat) == rendered(family, case["chat"])
    assert json.dumps(case["body"]) == before


def test_the_vectors_are_of_these_bodies():
    assert {(case["kind"], case["name"]) for case in CASES} == {each[:2] for each in bodies()}
    assert all(case["body"] in [body for *_, body in bodies()] for case in CASES)


@pytest.mark.parametrize("name", ["previous_response_id", "prompt", "conversation"])
def test_a_prompt_that_is_not_in_the_body_is_not_known(name):
    with pytest.raises(TokenizerError, match="all of the prompt in it"):
        chat_of_responses({"input": "x", name: "r1"})


@pytest.mark.parametrize(
    ("source", "merges"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", False),
        ("{{ raise_exception('no') if messages[2].role == 'system' }}", True),
        ("{{ strftime_now('%Y') }}", True),  # unknown where vLLM asks
        ("{% generation %}{% endgeneration %}", True),
    ],
)
def test_inner_system_messages_move_to_the_front_where_vllm_moves_them(source, merges):
    assert ChatTemplates({"default": source}).merges_system == merges


def test_without_a_template_system_messages_move():
    assert ChatTemplates({}).merges_system


@pytest.mark.parametrize(
    ("source", "effort"),
    [
        ("{{ enable_thinking }}", "none"),
        ("{{ reasoning_effort }}", "none"),
        ("{{ messages[0].content }}", "low"),
        ("{{ raise_exception('no') if reasoning_effort == 'none' }}{{ reasoning_effort }}", "low"),
    ],
)
def test_thinking_that_is_off_is_the_effort_that_makes_a_difference(source, effort):
    assert ChatTemplates({"default": source}).disabled_effort == effort
