"""What separates a request's blocks from those of others with equal tokens.

In:  the JSON body of a request, the LoRA adapter that it asks for.
Out: the namespace that the engine's events will name, too.

vLLM and SGLang keep requests apart by LoRA adapter and by `cache_salt`. SGLang knows `extra_key`
besides, which its events (0.5.23) leave out in either format: what such a request finds cached
cannot be known, so it gets a namespace that no event is in. Where its like went is still known
from the routing itself.
"""

from __future__ import annotations

from kvplug.events import Namespace
from kvplug.server.bodies import Body


def namespace_of(body: Body, lora_name: str = "") -> Namespace:
    """A batch of prompts is represented by its first one."""
    salt, extra_key = _text(body, "cache_salt"), _text(body, "extra_key")
    if extra_key:
        salt = f"\0extra_key\0{extra_key}\0{salt}"
    return Namespace(lora_name=lora_name, salt=salt)


def has_extra_key(body: Body) -> bool:
    """Whether the request is kept apart by something that no event says."""
    return bool(_text(body, "extra_key"))


def lora_path_of(body: Body) -> str:
    """The adapter that SGLang is asked for beside the model's name; "" if none."""
    return _text(body, "lora_path")


def _text(body: Body, field: str) -> str:
    """A text, or the first of a list of texts: SGLang takes one for each prompt."""
    value = body.get(field)
    if isinstance(value, list) and value:
        value = value[0]
    return value if isinstance(value, str) else ""
