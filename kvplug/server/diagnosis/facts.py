"""What an engine says of itself, without a request to its model.

In:  bodies of its HTTP routes.   Out: EngineFacts; None stands for what it does not say.

    vLLM 0.32.0     GET /version, /kv_event_sources, /metrics (vllm:cache_config_info); older ones
                    have no /kv_event_sources
    SGLang 0.5.23   GET /server_info
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

_CACHE_CONFIG = re.compile(rb"^vllm:cache_config_info\{(.*)\}", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """num_blocks: what the device of a rank has room for; caches: whether prefixes are cached;
    publishes: whether KV events are on; replays: whether past events can be asked for (of who
    publishes to NATS, the stream tells);
    event_format: SGLang's; num_ranks: data-parallel ranks; reports_cached: whether usage tells the
    cached tokens.
    """

    engine: str = ""
    version: str | None = None
    block_size: int | None = None
    num_blocks: int | None = None
    caches: bool | None = None
    publishes: bool | None = None
    replays: bool | None = None
    topic: str | None = None
    event_format: str | None = None
    num_ranks: int | None = None
    reports_cached: bool | None = None

    def merged(self, other: EngineFacts) -> EngineFacts:
        """Both; where both speak, the other."""
        answers = msgspec.structs.asdict(other)
        said = {name: value for name, value in answers.items() if value not in (None, "")}
        return msgspec.structs.replace(self, **said)


class _EventSource(msgspec.Struct):
    enable_kv_cache_events: bool = False
    publisher: str | None = None
    endpoint: str | None = None
    replay_endpoint: str | None = None
    topic: str = ""

    @property
    def publishes(self) -> bool:
        return self.enable_kv_cache_events and self.publisher != "null"

    @property
    def is_on_nats(self) -> bool:
        return (self.endpoint or "").startswith("nats://")


class _Version(msgspec.Struct):
    version: str


class _Descriptor(msgspec.Struct):
    block_size: int | None = None
    topic: str = ""
    replay_endpoint_port_base: int | None = None


class _ServerInfo(msgspec.Struct):
    page_size: int
    max_total_num_tokens: int | None = None
    version: str | None = None
    dp_size: int = 1
    enable_cache_report: bool | None = None
    disable_radix_cache: bool = False
    kv_events: _Descriptor | None = None
    kv_events_config: Any = None


def of_version(body: bytes) -> EngineFacts:
    """From vLLM's GET /version; ValueError for anything else, as in the others."""
    return EngineFacts(engine="vllm", version=msgspec.json.decode(body, type=_Version).version)


def of_event_sources(body: bytes) -> EngineFacts:
    """From vLLM's GET /kv_event_sources: the publisher of each data-parallel rank."""
    sources = list(msgspec.json.decode(body, type=dict[str, _EventSource]).values())
    if not sources:
        return EngineFacts(engine="vllm", publishes=False)
    return EngineFacts(
        engine="vllm",
        publishes=all(source.publishes for source in sources),
        replays=None if sources[0].is_on_nats else all(s.replay_endpoint for s in sources),
        topic=sources[0].topic or None,
        num_ranks=len(sources),
    )


def of_metrics(body: bytes) -> EngineFacts:
    """From vLLM's GET /metrics: the settings of its cache, said again for each rank."""
    found = _CACHE_CONFIG.findall(body)
    labels = dict(_LABEL.findall(found[0].decode())) if found else {}
    size, caches = labels.get("block_size", ""), labels.get("enable_prefix_caching")
    num_blocks = labels.get("num_gpu_blocks", "")
    return EngineFacts(
        engine="vllm" if found else "",
        num_ranks=len(found) or None,
        block_size=int(size) if size.isdecimal() else None,
        # Of all ranks (0.32). Each keeps one block for itself, the null block, and counts it.
        num_blocks=int(num_blocks) // len(found) - 1 if num_blocks.isdecimal() else None,
        caches=caches == "True" if caches in ("True", "False") else None,
    )


def of_server_info(body: bytes) -> EngineFacts:
    """From SGLang's GET /server_info."""
    info = msgspec.json.decode(body, type=_ServerInfo)
    settings, source = _events_config(info.kv_events_config), info.kv_events
    # Without a tcp endpoint SGLang publishes, too, but describes no publisher.
    publishes = source is not None or settings.get("publisher", "null") != "null"
    replays = settings.get("replay_endpoint") is not None
    num_tokens = info.max_total_num_tokens
    return EngineFacts(
        engine="sglang",
        version=info.version,
        block_size=(source and source.block_size) or info.page_size,
        num_blocks=None if num_tokens is None else num_tokens // max(1, info.page_size),
        caches=not info.disable_radix_cache,
        publishes=publishes,
        replays=replays or (source is not None and source.replay_endpoint_port_base is not None),
        topic=str(settings.get("topic") or "") or None,
        event_format=str(settings.get("format", "default")) if publishes else None,
        num_ranks=info.dp_size,
        reports_cached=info.enable_cache_report,
    )


def _events_config(value: object) -> dict[str, Any]:
    """SGLang repeats the text of its --kv-events-config."""
    try:
        decoded = msgspec.json.decode(value) if isinstance(value, str) else value
    except msgspec.DecodeError:
        return {}
    return decoded if isinstance(decoded, dict) else {}
