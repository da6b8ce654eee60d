"""What decided where a request goes, in one word.

In:  a decision, the router's mode, what the request says of itself.   Out: a word of a closed set.

Where nothing is known of a prompt, the word is why that is so (kvplug/server/api/prompts.py).
"""

from __future__ import annotations

from enum import StrEnum

from kvplug.router.config import RouterConfig
from kvplug.router.decider import Decision


class DecidedBy(StrEnum):
    """What decided, of a prompt that is known or did not matter."""

    PREFIX = "prefix"  # the worker holds some of the prompt, and so costs least
    LOAD = "load"  # it holds nothing of it: nobody does, or who does is too busy
    PINNED = "pinned"  # the request named its worker
    SESSION = "session"
    LEAST_LOADED = "least_loaded"
    POWER_OF_TWO = "power_of_two"
    ROUND_ROBIN = "round_robin"
    RANDOM = "random"


def reason_of(
    decision: Decision,
    config: RouterConfig,
    *,
    worker: str = "",
    session: str = "",
    unknown_because: str | None = None,
    weighs_prefix: bool = True,
) -> str:
    """`worker`, `session`: that the request named; `unknown_because`: why nothing is known of the
    prompt, or of its rest; `weighs_prefix`: whether the request lets prefixes count.
    """
    if worker:
        return DecidedBy.PINNED
    match config.mode:
        case "rendezvous_hash":
            return DecidedBy.SESSION if session else DecidedBy.LEAST_LOADED
        case "direct":
            return DecidedBy.LEAST_LOADED
        case "kv":
            if weighs_prefix and decision.overlap_blocks:
                return DecidedBy.PREFIX
            return unknown_because or DecidedBy.LOAD
        case mode:
            return DecidedBy(mode)
