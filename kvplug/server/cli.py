"""The command line of `python -m kvplug.router`.

In:  argv.   Out: a ServerConfig, or exit code 2 with one sentence.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from kvplug._version import __version__
from kvplug.errors import ConfigError
from kvplug.router.config import Cost, Mode, RouterConfig
from kvplug.server.config import ServerConfig, WorkerSpec

_MAX_COUNT = 2**63 - 1
_ROUTER, _SERVER = RouterConfig(), ServerConfig(workers=(WorkerSpec(url="http://127.0.0.1"),))


def parse(argv: Sequence[str] | None = None) -> tuple[ServerConfig, str]:
    """The configuration and the log level; leaves the process with code 2 on bad arguments."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    try:
        return _config(arguments), arguments.log_level
    except ConfigError as error:
        parser.error(str(error))


def _config(arguments: argparse.Namespace) -> ServerConfig:
    router = RouterConfig(
        block_size=getattr(arguments, "block_size", None),
        mode=arguments.router_mode,
        cost=arguments.cost,
        overlap_score_weight=arguments.kv_overlap_score_weight,
        ttft_slo_ms=arguments.ttft_slo_ms,
        itl_slo_ms=arguments.itl_slo_ms,
        temperature=arguments.router_temperature,
        speculative_ttl_s=arguments.speculative_ttl_s,
        use_kv_events=arguments.use_kv_events,
        approximate_ttl_s=arguments.approximate_ttl_s,
        max_index_blocks=arguments.max_index_blocks,
        max_index_bytes=arguments.max_index_bytes,
    )
    return ServerConfig(
        workers=tuple(WorkerSpec.parse(text) for text in arguments.worker),
        host=arguments.host,
        port=arguments.port,
        router=router,
        tokenizer=arguments.tokenizer,
        worker_api_key_file=arguments.worker_api_key_file,
        events_bind=arguments.events_bind,
        max_body_bytes=arguments.max_body_bytes,
        health_interval_s=arguments.health_interval_s,
        request_timeout_s=arguments.request_timeout_s,
        client_timeout_s=arguments.client_timeout_s,
        max_connections=getattr(arguments, "max_connections", None),
        grace_s=arguments.grace_s,
        audit_sample=arguments.audit_sample,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kvplug.router",
        description="An OpenAI-compatible front door that sends each request to the engine that "
        "already holds its prefix in KV cache.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"kvplug {__version__}")
    _add_serving(parser.add_argument_group("serving"))
    _add_routing(parser.add_argument_group("routing"))
    return parser


def _add_serving(group: argparse._ArgumentGroup) -> None:
    _add_engines(group)
    _add_door(group)
    _add_patience(group)
    _add_reports(group)


def _add_engines(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--worker",
        action="append",
        default=[],
        metavar="URL[,events=ENDPOINT][,replay=ENDPOINT][,topic=PREFIX][,block_size=N]",
        help="an engine and where it publishes its KV events; repeat for each engine",
    )
    group.add_argument(
        "--worker-api-key-file",
        type=Path,
        metavar="FILE",
        help="holds the key that engines demand, for what the router asks on its own",
    )
    group.add_argument(
        "--events-bind",
        metavar="ENDPOINT",
        help="where engines connect to that do not let the router connect to them",
    )


def _add_door(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--host", default=_SERVER.host, help="address to listen on")
    add("--port", type=int, default=_SERVER.port, help="port to listen on; 0 takes a free one")
    add("--tokenizer", type=Path, metavar="FOLDER", help="tokenizer.json and chat template")
    add("--max-body-bytes", type=int, default=_SERVER.max_body_bytes, help="largest request body")
    text = "of clients at once (default: as many as there are descriptors for)"
    add("--max-connections", type=int, default=argparse.SUPPRESS, help=text)


def _add_patience(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--health-interval-s", type=float, default=_SERVER.health_interval_s, help="between looks")
    add("--request-timeout-s", type=float, default=_SERVER.request_timeout_s, help="of silence")
    text = "for a request to arrive, and for an idle connection to be used again"
    add("--client-timeout-s", type=float, default=_SERVER.client_timeout_s, help=text)
    add("--grace-s", type=float, default=_SERVER.grace_s, help="for requests in flight at stop")


def _add_reports(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--audit-sample",
        type=float,
        default=_SERVER.audit_sample,
        help="share of requests whose "
        "predicted cached tokens are compared with the answer; 0 is off",
    )
    add("--log-level", default="info", choices=["debug", "info", "warning", "error"], help=" ")


def _add_routing(group: argparse._ArgumentGroup) -> None:
    _add_mode(group)
    _add_costs(group)
    _add_slos(group)
    _add_index_bounds(group)
    _add_approximation(group)


def _add_mode(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--router-mode",
        "--mode",
        choices=get_args(Mode),
        default=_ROUTER.mode,
        help="kv: by cached prefix and load; round_robin: by turns",
    )
    add(
        "--block-size",
        type=int,
        default=argparse.SUPPRESS,
        help="tokens per block of workers that name none (default: what their events say)",
    )


def _add_costs(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--cost",
        choices=get_args(Cost),
        help="ms: what a choice costs the fleet in milliseconds; blocks: blocks to prefill and to "
        "decode (default: ms, blocks if a weight is given)",
    )
    add(
        "--kv-overlap-score-weight",
        type=float,
        help="go by the cost in blocks: what a block to prefill costs in blocks to decode; 0 "
        "routes by load alone",
    )
    add(
        "--router-temperature",
        type=float,
        default=_ROUTER.temperature,
        help="0 takes the lowest cost; above 0, softmax over the costs",
    )
    add(
        "--speculative-ttl-s",
        type=float,
        default=_ROUTER.speculative_ttl_s,
        help="how long a routed prompt counts as cached until the engine says so; 0 is off",
    )


def _add_slos(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--ttft-slo-ms", type=float, help="avoid workers predicted to take longer to first token")
    add("--itl-slo-ms", type=float, help="avoid workers predicted to take longer between tokens")


def _count(text: str) -> int:
    """What the tables of an index can count to; Bounds knows how little is too little."""
    try:
        number = int(text)
    except ValueError:
        number = _MAX_COUNT + 1
    if number > _MAX_COUNT:
        raise argparse.ArgumentTypeError(f"expected a whole number below 2**63, got {text!r}")
    return number


def _add_index_bounds(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--max-index-blocks",
        type=_count,
        help="distinct blocks that each index holds at most; the tails used longest ago go first",
    )
    add("--max-index-bytes", type=_count, help="memory that each index takes at most")


def _add_approximation(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--no-kv-events",
        dest="use_kv_events",
        action="store_false",
        help="use no events: what was routed to a worker counts as cached there for a while",
    )
    add(
        "--approximate-ttl-s",
        type=float,
        default=_ROUTER.approximate_ttl_s,
        help="with --no-kv-events: for how long after the last request that had it",
    )
