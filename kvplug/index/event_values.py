"""Whether the values of an event can be those of one.

In:  an event that somebody made by hand; decoded ones are sound.   Out: True or False.

Hashes, tokens and keys are checked as they are converted (kvplug/hashing.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kvplug.events import (
    AllBlocksCleared,
    BlockCopied,
    BlockRemoved,
    BlockStored,
    CxlMetadata,
    CxlState,
    CxlStateTransition,
    MoeLabel,
    Namespace,
    Tier,
)
from kvplug.setting import whole

_TIERS = frozenset(Tier)
_MOST = 2**63 - 1


def is_sound(event: object) -> bool:
    """Whether an event can be applied, as far as its values go."""
    check = _CHECKS.get(type(event))
    return _is_row(getattr(event, "block_hashes", None)) if check is None else check(event)


def _is_row(value: object) -> bool:
    """Of numbers, whatever they are."""
    if type(value) is tuple:
        return True
    if isinstance(value, np.ndarray):
        return value.ndim == 1
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def _is_count(value: object) -> bool:
    return 0 <= (value if type(value) is int else whole(value)) <= _MOST


def _is_optional_count(value: object) -> bool:
    return value is None or _is_count(value)


def _is_tier(value: object) -> bool:
    return type(value) is Tier or (_is_count(value) and value in _TIERS)


def _are_names(value: object) -> bool:
    return value is None or (
        _is_row(value) and all(type(name) is str for name in value)  # type: ignore[attr-defined]
    )


def _is_namespace(value: object) -> bool:
    return value is None or (
        type(value) is Namespace and type(value.lora_name) is type(value.salt) is str
    )


def _are_keys(value: object) -> bool:
    return (type(value) is tuple and not value) or (
        _is_row(value) and all(_is_row(keys) for keys in value)  # type: ignore[attr-defined]
    )


def _is_pooled(value: object) -> bool:
    return value is None or (
        type(value) is CxlMetadata
        and type(value.state) is CxlState
        and _is_optional_count(value.pool_id)
        and _are_names(value.accessible_workers)
    )


def _is_label(value: object) -> bool:
    return value is None or (
        type(value) is MoeLabel
        and _is_count(value.layer)
        and _is_count(value.expert)
        and _is_count(value.group)
    )


def _is_of_group(event: BlockStored | BlockCopied) -> bool:
    return (
        _is_row(event.block_hashes)
        and _is_tier(event.tier)
        and _is_count(event.group)
        and type(event.attention) is str
        and _is_optional_count(event.sliding_window)
    )


def _is_stored(event: BlockStored) -> bool:
    return (
        _is_of_group(event)
        and _is_row(event.token_ids)
        and _is_count(event.block_size)
        and type(event.bigrams) is bool
        and _is_namespace(event.namespace)
        and _are_keys(event.extra_keys)
        and _is_pooled(event.cxl)
        and _is_label(event.moe)
    )


def _is_removed(event: BlockRemoved) -> bool:
    return _is_row(event.block_hashes) and _is_tier(event.tier) and _is_count(event.group)


def _is_cleared(event: AllBlocksCleared) -> bool:
    return event.tier is None or _is_tier(event.tier)


def _is_transition(event: CxlStateTransition) -> bool:
    return (
        _is_row(event.block_hashes)
        and type(event.new_state) is CxlState
        and _is_optional_count(event.pool_id)
        and _are_names(event.accessible_workers)
    )


_CHECKS: dict[type, Callable[..., bool]] = {
    BlockStored: _is_stored,
    BlockCopied: _is_of_group,
    BlockRemoved: _is_removed,
    AllBlocksCleared: _is_cleared,
    CxlStateTransition: _is_transition,
}
