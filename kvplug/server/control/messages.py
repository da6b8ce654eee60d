"""What /select, /reservations and /workers are asked, and what they answer.

In:  JSON.   Out: structs whose fields are what their types say, or ApiError in one sentence.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from kvplug.api_errors import ApiError
from kvplug.events import MAX_DP_SIZE
from kvplug.router.options import MAX_TOKENS
from kvplug.server.api.prompts import Reason
from kvplug.server.proxy.deciding import DecidedBy

_T = TypeVar("_T")
_LARGE_BYTES: Final = 100_000
MAX_RANKED: Final = 1024

Name = Annotated[str, Meta(min_length=1, max_length=1024)]
Names = Annotated[list[Name], Meta(max_length=10_000)]
DpRank = Annotated[int, Meta(ge=0, lt=MAX_DP_SIZE)]
NumTokens = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
Weight = Annotated[float, Meta(ge=0, le=1e9)]
# Not read twice: they go on to where the bodies of clients are read.
_Unread = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 2**32 - 1}}
TokenIds = Annotated[msgspec.Raw, Meta(extra_json_schema=_Unread)]
Messages = Annotated[msgspec.Raw, Meta(extra_json_schema={"type": "array"})]
_REASONS: Final = sorted({*DecidedBy, *Reason} - {Reason.MODE})  # the mode says its name instead
WhySelected = Annotated[str, Meta(extra_json_schema={"enum": _REASONS})]
WholeBody = Annotated[msgspec.Raw, Meta(extra_json_schema={"type": "object"})]


class _Asked(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A name that is mistyped is refused, not ignored."""


class Select(_Asked):
    """Where should this request go? Exactly one of token_ids, text, messages, body and
    sequence_hashes.

    body: of the endpoint `path`, whole; it names the model. sequence_hashes: of the full blocks of
    `num_tokens` tokens, unsigned. reserve: count the request as load of the worker, until it is
    finished or expires. workers: only these. num_ranked: how many ranks to list with their costs.
    explain: what each candidate holds of the prompt and is busy with. The others as the options of
    docs/api.md.
    """

    model: str = ""
    token_ids: TokenIds | UnsetType = UNSET
    text: str | None = None
    messages: Messages | UnsetType = UNSET
    body: WholeBody | UnsetType = UNSET
    path: str = "/v1/chat/completions"
    sequence_hashes: Annotated[list[int], Meta(max_length=2**20)] | None = None
    num_tokens: NumTokens | None = None
    cache_salt: str = ""
    extra_key: str = ""
    reserve: bool = False
    request_id: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    workers: Names | None = None
    worker: str = ""
    dp_rank: DpRank | None = None
    required_taints: Names = []
    preferred_taints: dict[str, float] = {}
    session: str = ""
    max_tokens: NumTokens | None = None
    reports_first_token: bool = True
    num_ranked: Annotated[int, Meta(ge=0, le=MAX_RANKED)] = 3
    overlap_score_weight: Weight | None = None
    router_temperature: Weight | None = None
    explain: bool = False


class RankedRank(msgspec.Struct, kw_only=True):
    """A candidate: the chosen one first, then others by their costs."""

    worker: str
    url: str
    dp_rank: int
    cost: float


class RankView(msgspec.Struct, kw_only=True):
    """What a candidate holds of the prompt, and would be busy with if it got the request."""

    worker: str
    dp_rank: int
    overlap_blocks: int
    potential_prefill_tokens: int
    potential_decode_blocks: int


class Selection(msgspec.Struct, kw_only=True):
    """The worker that should get the request.

    request_id: of the reservation, "" without one. dp_rank: to be named in the header of `headers`
    if the worker has several. reason: what decided. is_prefix_known: false where the prompt's
    tokens are not known here, so that load alone decided. cost: in `cost_unit`. expires_s: when the
    reservation ends by itself, unless it is renewed.
    """

    request_id: str
    model: str
    worker: str
    url: str
    dp_rank: int
    headers: dict[str, str]
    reason: WhySelected
    is_prefix_known: bool
    prompt_tokens: int
    prompt_blocks: int
    overlap_blocks: int
    cached_tokens: int
    block_size: int
    cost: float
    cost_unit: str
    predicted_ttft_ms: float
    ranked: list[RankedRank]
    ranks: list[RankView] | None = None
    expires_s: float | None = None


class Finish(_Asked):
    """The request is over. completion_tokens: length of the answer; prompt_tokens, cached_tokens:
    as the engine's usage says, for the audit.
    """

    completion_tokens: NumTokens | None = None
    prompt_tokens: NumTokens | None = None
    cached_tokens: NumTokens | None = None


class Failed(_Asked):
    """The worker failed at the request. status: that it answered; null if there was no answer, or
    it broke off.
    """

    status: Annotated[int, Meta(ge=400, le=599)] | None = None


class Moved(_Asked):
    """The request went to another rank than the selected one."""

    worker: Name
    dp_rank: DpRank = 0


class Reservation(msgspec.Struct, kw_only=True):
    """A request in flight. age_s: since it was placed; expires_s: from now."""

    request_id: str
    worker: str
    dp_rank: int
    age_s: float
    expires_s: float
    has_first_token: bool


class AddWorker(_Asked):
    """An engine, as `--worker` has it; taints: names that requests may require or prefer."""

    worker: Annotated[str, Meta(min_length=1, max_length=4096)]
    taints: Names = []


class ChangeWorker(_Asked):
    """taints: instead of those that it has; drain: whether it gets no new requests."""

    taints: Names | None = None
    drain: bool | None = None


class WorkerState(msgspec.Struct, kw_only=True):
    """state: up, down, draining, or unknown: nobody has said yet where its API is."""

    name: str
    url: str | None
    state: str
    reason: str | None
    models: list[str]
    dp_size: int
    taints: list[str]
    requests_in_flight: int


class WorkerList(msgspec.Struct, kw_only=True):
    """All workers."""

    workers: list[WorkerState]


async def read_message(raw: bytes, kind: type[_T]) -> _T:
    """What a body says; ApiError, 400, names the field that is wrong. Nothing reads as {}."""
    try:
        if len(raw) < _LARGE_BYTES:
            return msgspec.json.decode(raw or b"{}", type=kind)
        return await asyncio.to_thread(msgspec.json.decode, raw, type=kind)
    except msgspec.ValidationError as error:
        raise ApiError(400, f"the body is wrong: {error}", code="invalid_field") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        message = f"the body must be a JSON object: {error}"
        raise ApiError(400, message, code="invalid_json") from error


def schema_of(*kinds: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:  # noqa: ANN401
    """A JSON schema of each, and what they have in common, by name."""
    found = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    return list(found[0]), dict(found[1])
