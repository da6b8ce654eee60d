"""The load that an engine reports, and what of it is not this router's own.

In:  what an engine says it is busy with; what this router has sent there.
Out: the load of others, which counts beside its own.

Other routers, replicas of this one and clients that ask an engine directly are seen in no event. An
engine counts all: what exceeds the router's own requests on the rank is the load of others. A
report may be some steps old: a request sent since is then counted once, not twice, and one that has
just ended is taken for another's until the next report.
"""

from __future__ import annotations

import msgspec

from kvplug.errors import ConfigError
from kvplug.router.arguments import MAX_BLOCKS
from kvplug.setting import shown, whole


class ReportedLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine says of one rank; None where it does not say.

    num_running: requests in its batch, in prefill or decoding; num_waiting: those in its queue;
    waiting_tokens: of prompts, that it has yet to compute; active_blocks: in use by requests.
    """

    num_running: int | None = None
    num_waiting: int | None = None
    waiting_tokens: int | None = None
    active_blocks: int | None = None

    def __post_init__(self) -> None:
        """ConfigError for what is no count."""
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value is not None and not 0 <= whole(value) <= MAX_BLOCKS:
                raise ConfigError(
                    f"cannot set the reported load: expected {name} to be a whole number in "
                    f"[0, {MAX_BLOCKS}], or None, got {shown(value)}"
                )


class OthersLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Of one rank, in the columns of kernels/costing.py: not this router's own.

    num_waiting: of `num_in_flight`, without a first token; tokens, ms, coming: to be computed for
    these, in tokens, milliseconds and blocks; blocks: in use by requests.
    """

    num_in_flight: float = 0.0
    num_waiting: float = 0.0
    tokens: float = 0.0
    ms: float = 0.0
    coming: float = 0.0
    blocks: float = 0.0


NO_OTHERS = OthersLoad()


def others_of(
    reported: ReportedLoad, own: OthersLoad, token_ms: float, block_size: int
) -> OthersLoad:
    """What exceeds the router's own load, as given in the same columns."""
    tokens = _excess(reported.waiting_tokens, own.tokens)
    # Tokens are waited for by somebody, though the engine may have it in its batch already.
    num_waiting = max(_excess(reported.num_waiting, own.num_waiting), float(tokens > 0))
    num_in_flight = num_waiting
    if reported.num_running is not None:
        in_flight = reported.num_running + (reported.num_waiting or 0)
        num_in_flight = max(_excess(in_flight, own.num_in_flight), float(tokens > 0))
        num_waiting = min(num_waiting, num_in_flight)
    return OthersLoad(
        num_in_flight=num_in_flight,
        num_waiting=num_waiting,
        tokens=tokens,
        ms=tokens * token_ms,
        coming=tokens / block_size,
        blocks=_excess(reported.active_blocks, own.blocks),
    )


def _excess(reported: int | None, own: float) -> float:
    return 0.0 if reported is None else max(0.0, reported - own)
