"""Of a chat with pictures, the token ids before the first one are those of the whole prompt."""

import pytest

from kvplug.errors import TokenizerError
from kvplug.tokenization.chat_template import ChatTemplates
from kvplug.tokenization.media import common_length, has_media
from kvplug.tokenization.prompt_kind import PromptKind
from kvplug.tokenization.prompt_tokenizer import Extent, PromptTokenizer
from tests.tokenization.conftest import write_folder

PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
TEXT = {"type": "text", "text": "the cat sat on the mat and looked"}
SYSTEM = {"role": "system", "content": "you see the cat and the mat. now say what they do."}
INLINE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}"
    "{% if part.type == 'image' %}<|vision|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
)
PICTURES_FIRST = INLINE.replace(
    "{% for part in m.content %}",
    "{% for part in m.content if part.type == 'image' %}<|vision|>{% endfor %}"
    "{% for part in m.content if part.type != 'image' %}",
)
STRINGS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def user(*parts):
    return {"role": "user", "content": list(parts)}


def before(source, *messages):
    text, end = ChatTemplates({"default": source}).render_before_media(
        {"messages": list(messages)}, {}
    )
    return text[:end]


HEAD = f"<|im_start|>system\n{SYSTEM['content']}<|im_end|>\n<|im_start|>user\n"


@pytest.mark.parametrize(
    ("source", "parts", "text"),
    [
        (INLINE, [TEXT, PICTURE], HEAD + TEXT["text"]),
        (INLINE, [PICTURE, TEXT], HEAD),
        (PICTURES_FIRST, [TEXT, PICTURE], HEAD),  # whatever the order in the body
        (STRINGS, [TEXT, PICTURE], HEAD),  # vLLM puts them in front of the message's text
        (STRINGS, [PICTURE, PICTURE], HEAD),
    ],
)
def test_the_text_before_the_first_picture(source, parts, text):
    assert before(source, SYSTEM, user(*parts), user(TEXT), user(PICTURE)) == text


def test_what_is_a_picture():
    assert has_media([user(TEXT, PICTURE)])
    assert has_media([user({"type": "input_audio", "input_audio": {}})])
    assert has_media([user({"video_url": {"url": "x"}})])
    assert not has_media([user(TEXT), SYSTEM, "x", {"content": [["x"]]}])
    assert not has_media(None)


@pytest.mark.parametrize(
    ("text", "begin", "length"), [("", "", 0), ("ab", "ab", 2), ("abc", "ab", 2), ("axc", "abc", 1)]
)
def test_how_far_texts_are_equal(text, begin, length):
    assert common_length(text, begin) == length


@pytest.fixture
def load(tmp_path):
    """A tokenizer with this template; its vocabulary has <|im_start|> and <|im_end|>."""
    return lambda source: PromptTokenizer.from_folder(
        write_folder(
            tmp_path, "byte_level.json", {"tokenizer_config.json": {"chat_template": source}}
        )
    )


@pytest.mark.parametrize("source", [INLINE, PICTURES_FIRST, STRINGS])
@pytest.mark.parametrize("parts", [[TEXT, PICTURE], [PICTURE, TEXT]])
def test_the_ids_are_the_beginning_of_the_whole(load, source, parts):
    tokenizer = load(source)
    body = {"messages": [SYSTEM, user(*parts), user(TEXT)]}
    prompt = tokenizer.first(body, PromptKind.CHAT, max_new=10**6)
    assert prompt.extent is Extent.BEFORE_MEDIA
    without = {"messages": [SYSTEM, user(TEXT)]}
    whole = tokenizer.chat(without).tolist()
    assert len(prompt.ids) > 10
    assert prompt.ids.tolist() == whole[: len(prompt.ids)]


def test_a_picture_at_the_very_beginning_leaves_nothing(load):
    with pytest.raises(TokenizerError, match="a text before the first picture"):
        load("{% for m in messages %}{{ m.content }}{% endfor %}").first(
            {"messages": [user(PICTURE, TEXT)]}, PromptKind.CHAT, max_new=100
        )


def test_a_limit_from_the_end_cannot_be_kept(load):
    body = {"messages": [SYSTEM, user(PICTURE)], "truncate_prompt_tokens": 5}
    with pytest.raises(TokenizerError, match="no truncate_prompt_tokens"):
        load(INLINE).first(body, PromptKind.CHAT, max_new=100)


def test_pictures_of_the_other_apis_count_too(load):
    tokenizer = load(INLINE)
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    messages = {
        "system": SYSTEM["content"],
        "messages": [user({"type": "image", "source": source})],
    }
    responses = {
        "instructions": SYSTEM["content"],
        "input": [user({"type": "input_image", "image_url": "data:,"})],
    }
    for kind, body, with_special in (
        (PromptKind.MESSAGES, messages, False),
        (PromptKind.RESPONSES, responses, True),
    ):
        chat = {"messages": [SYSTEM, user(PICTURE)], "add_special_tokens": with_special}
        expected = tokenizer.first(chat, PromptKind.CHAT, max_new=10**6)
        prompt = tokenizer.first(body, kind, max_new=10**6)
        assert prompt.extent is Extent.BEFORE_MEDIA
        assert prompt.ids.tolist() == expected.ids.tolist()
