"""What an engine is asked to generate.

In:  dicts of a caller.   Out: checked structs; ConfigError says what was expected.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, structs

from kvplug.errors import ConfigError
from kvplug.events import Namespace
from kvplug.setting import shown

_Given = TypeVar("_Given", bound=msgspec.Struct)


class StopConditions(msgspec.Struct, frozen=True, kw_only=True):
    """When an answer ends.

    max_tokens: None up to the engine's limit; min_tokens: no end before; ignore_eos: an EOS token
    is no end; stop: texts that end it; stop_token_ids: tokens that end it.
    """

    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    min_tokens: Annotated[int, Meta(ge=0)] = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()

    def after(self, num_tokens: int) -> StopConditions:
        """For the rest of an answer of which there are so many tokens, fewer than `max_tokens`."""
        max_tokens = None if self.max_tokens is None else self.max_tokens - num_tokens
        min_tokens = max(0, self.min_tokens - num_tokens)
        return structs.replace(self, max_tokens=max_tokens, min_tokens=min_tokens)


class SamplingOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are drawn; None: as the engine does by default."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None

    def given(self) -> dict[str, Any]:
        """Those that are not None, by name."""
        return {name: value for name, value in structs.asdict(self).items() if value is not None}


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request to one engine.

    token_ids: the prompt, and behind it what other engines have generated; dp_rank: None if the
    worker has one rank only.
    """

    token_ids: Sequence[int]
    model: str = ""
    namespace: Namespace = Namespace()
    stop_conditions: StopConditions = StopConditions()
    sampling_options: SamplingOptions = SamplingOptions()
    dp_rank: int | None = None


def checked(given: Mapping[str, object] | None, kind: type[_Given], name: str) -> _Given:
    """What a caller gave as `name`, as a struct; ConfigError for unknown names and wrong values."""
    fields = {} if given is None else given
    if not isinstance(fields, Mapping):
        raise ConfigError(f"{name} must be a dict, got {shown(given)}")
    known = kind.__struct_fields__
    if unknown := [field for field in fields if field not in known]:
        raise ConfigError(f"{name} has {', '.join(known)}; got {shown(unknown[0])}")
    try:
        return msgspec.convert(dict(fields), kind, from_attributes=True)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{name} cannot be used: {error}") from error
