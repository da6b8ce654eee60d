"""Pictures and sounds in a chat: which there are, and the text before the first one.

In:  the messages of a body.   Out: messages with a mark where each of them is.

What an engine puts in the place of a picture is the model's own: how many tokens, and a hash of
what the engine decoded. But all that comes before the first one is text, and is matched.
"""

from __future__ import annotations

from typing import Any, Final

from kvplug.tokenization.content_format import ContentFormat

Json = dict[str, Any]

# In no text: characters for private use, by which no template is written.
MARK: Final = "\ue000media\ue001"
# Types of parts, and fields of such parts, that stand for a picture, a sound or a film.
# fmt: off
_MODALITIES: Final = {
    "image": "image", "image_url": "image", "image_embeds": "image", "image_pil": "image",
    "input_image": "image", "audio": "audio", "audio_url": "audio", "input_audio": "audio",
    "audio_embeds": "audio", "video": "video", "video_url": "video", "video_embeds": "video",
}
# fmt: on


def modality_of(part: object) -> str | None:
    """What a part of a message is, if it is no text."""
    if not isinstance(part, dict):
        return None
    kind = part.get("type")
    if isinstance(kind, str) and kind in _MODALITIES:
        return _MODALITIES[kind]
    return next((it for name, it in _MODALITIES.items() if name in part), None)


def has_media(messages: object) -> bool:
    """Whether a message of a body has a part that is no text."""
    contents = [message.get("content") for message in _objects_in(messages)]
    return any(modality_of(part) for content in contents for part in _objects_in(content))


def _objects_in(value: object) -> list[Json]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def marked(messages: list[Json], form: ContentFormat) -> list[Json]:
    """With texts in the place of pictures.

    In a message that is one text vLLM puts all pictures in front of it.
    """
    return [_marked(message, form) for message in messages]


def _marked(message: Json, form: ContentFormat) -> Json:
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list) or not any(map(modality_of, content)):
        return message
    kinds = [modality_of(part) for part in content]
    marks = [kind and {"type": "text", "text": MARK, "modality": kind} for kind in kinds]
    parts = [mark or part for mark, part in zip(marks, content, strict=True)]
    if form == "string":
        parts = sorted(parts, key=lambda part: not isinstance(part, dict) or "modality" not in part)
    return {**message, "content": parts}


def unmarked(chat: list[Json]) -> list[Json]:
    """With the parts that an "openai" template gets for pictures, of messages as it gets them."""
    return [
        {**message, "content": [_unmarked(part) for part in message["content"]]}
        if isinstance(message["content"], list)
        else message
        for message in chat
    ]


def _unmarked(part: Json) -> Json:
    return {"type": part["modality"]} if part.get("text") == MARK else part


def common_length(text: str, begin: str) -> int:
    """How far both texts are equal."""
    low, high = 0, min(len(text), len(begin))
    while low < high:  # by halves: a comparison of slices runs at the speed of memory
        middle = (low + high + 1) // 2
        if text[low:middle] == begin[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
