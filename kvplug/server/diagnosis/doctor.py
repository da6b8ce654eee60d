"""`python -m kvplug.router doctor`: what is wrong with a fleet, and what its event streams are.

In:  the URL of a running router, or workers to ask directly, as flags or a file of settings say.
Out: two tables; exit code 0 if nothing is found, 1 if something is, 2 if nobody could be asked.

What only traffic shows (events that never match, a usage without cached tokens) is not found by
asking directly.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec

from kvplug.audit.audit import Audit
from kvplug.errors import ConfigError, TransportError
from kvplug.router.config import RouterConfig
from kvplug.router.core import Router
from kvplug.server.api.prompts import Prompts
from kvplug.server.cluster_config import ClusterConfig
from kvplug.server.config import ServerConfig, TokenizerFolder, WorkerSpec
from kvplug.server.diagnosis.board import Diagnosis
from kvplug.server.diagnosis.finding import Code, Finding, table_of
from kvplug.server.diagnosis.streams import WorkerHealth, lines_of
from kvplug.server.observability.health import Health
from kvplug.server.proxy.upstream import Upstream
from kvplug.server.settings_file import read_settings
from kvplug.server.workers.asking import WorkerSession
from kvplug.server.workers.fleet import Fleet
from kvplug.server.workers.worker import Worker
from kvplug.setting import settings_of
from kvplug.setting_file import FileSettings

NOTHING, SOMETHING, UNREACHABLE = 0, 1, 2

_DEFAULT_URL = "http://127.0.0.1:8000"
_TIMEOUT_S = 10.0
_CONNECT_LIMIT_S = 3.0
_KEYS: Final = ("worker_api_key_file", "events_key_file", "events_server_key")
_LOOK_EVERY_S = 0.2
_POLL_S = 0.02


class _Health(msgspec.Struct):
    findings: list[Finding]
    workers: list[WorkerHealth]


def main(argv: Sequence[str]) -> int:
    """Ask, print, and say by the exit code."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    logging.getLogger("kvplug").addHandler(logging.NullHandler())  # the table says it all
    found, url = FileSettings(), arguments.url or _DEFAULT_URL
    try:
        if arguments.config is not None:
            found = read_settings(arguments.config)
        config = _config_of(arguments, found)
        health = asyncio.run(_ask_router(url) if config is None else _ask_engines(config))
    except ConfigError as error:
        parser.error(found.located(str(error)))
    except TransportError as error:
        parser.error(f"{error}; if a router is running, ask it with --url")
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        reason = str(error) or type(error).__name__
        sys.stderr.write(f"doctor: no answer from a router at {url}: {reason}\n")
        return UNREACHABLE
    lines = [table_of(health.findings), *lines_of(health.workers)]
    sys.stdout.write("\n".join(lines) + "\n")
    return SOMETHING if health.findings else NOTHING


def _config_of(arguments: argparse.Namespace, found: FileSettings) -> ServerConfig | None:
    """Of the router that is to serve the workers; None if a running one is to be asked."""
    given = {
        "workers": tuple(map(WorkerSpec.parse, arguments.worker)),
        "tokenizers": tuple(map(TokenizerFolder.parse, arguments.tokenizer)),
        "block_size": arguments.block_size,
        **{name: getattr(arguments, name) for name in _KEYS},
    }
    values = found.values | {
        name: value for name, value in given.items() if value not in (None, ())
    }
    is_router_asked = arguments.url is not None and not arguments.worker
    if is_router_asked or not values.get("workers"):
        return None
    values["health_interval_s"] = _LOOK_EVERY_S
    router = RouterConfig(**_of(RouterConfig, values))
    cluster = ClusterConfig(**_of(ClusterConfig, values))
    return ServerConfig(router=router, cluster=cluster, **_of(ServerConfig, values))


def _of(config: type[Any], values: dict[str, Any]) -> dict[str, Any]:
    names = {each.name for each, _ in settings_of(config)}
    return {name: value for name, value in values.items() if name in names}


async def _ask_engines(config: ServerConfig) -> _Health:
    async with Upstream(config) as upstream:
        return await _ask_workers(config, upstream.session)


async def _ask_router(url: str) -> _Health:
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        # A fleet without a worker that is up answers 503, with the same body.
        session.get(url.rstrip("/") + "/health") as response,
    ):
        return msgspec.json.decode(await response.read(), type=_Health)


async def _ask_workers(config: ServerConfig, session: WorkerSession) -> _Health:
    """Connect to all workers and their events, ask, and leave again."""
    audit = Audit(Router(config.router))
    fleet = Fleet(config, audit.router, audit, session)
    diagnosis = Diagnosis(
        config, fleet, audit, Prompts(config.tokenizer_folders), session, connect_grace_s=0.0
    )
    try:
        await fleet.start()
        await _wait_until(lambda: all(map(_has_begun, fleet.workers.values())))
        await diagnosis.ask()
        health = msgspec.convert(Health(fleet, audit.router, audit, diagnosis).body(), _Health)
    finally:
        await fleet.stop()
    # Who comes for a moment has not missed what it would have to know, and does not join routers.
    passed_over = {Code.EVENTS_INCOMPLETE}
    if config.cluster.nats is not None:
        passed_over.add(Code.NO_EVENT_ENDPOINT)
    health.findings = [each for each in health.findings if each.code not in passed_over]
    return health


def _has_begun(worker: Worker) -> bool:
    """Whether its streams are connected, and it was found if they say where it is."""
    is_found = worker.is_up or worker.spec.url is not None
    return is_found and all(follower.connected for follower in worker.followers.values())


async def _wait_until(condition: Callable[[], bool]) -> None:
    """For a while; whatever does not come is among the findings."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_CONNECT_LIMIT_S):
            # The thread that connects them knows no event loop.
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(_POLL_S)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kvplug.router doctor",
        description="What is wrong with a fleet, and the fix. Exit code 0: nothing is found, 1: "
        "something is, 2: the router could not be asked.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--url", help=f"a running router, which knows most ({_DEFAULT_URL})")
    text = "the router's file of settings; its workers are asked, unless --url is given"
    add("--config", type=Path, metavar="FILE", help=text)
    form = "ADDRESS[,events=ENDPOINT][,topic=PREFIX][,dp_size=N]"
    text = "ask this engine instead of a router; repeat for each"
    add("--worker", action="append", default=[], metavar=form, help=text)
    text = "tokens per block that the router is to have; with --worker"
    add("--block-size", type=int, help=text)
    text = "tokenizer.json and chat template, of one model or all others; repeat; with --worker"
    add("--tokenizer", action="append", default=[], metavar="[MODEL=]FOLDER", help=text)
    text = "holds the key of engines that demand one; with --worker"
    add("--worker-api-key-file", type=Path, metavar="FILE", help=text)
    text = "the secret CURVE key that the router is to have; with --worker"
    add("--events-key-file", type=Path, metavar="FILE", help=text)
    text = "the public CURVE key of the engines' publishers; with --worker"
    add("--events-server-key", type=Path, metavar="FILE", help=text)
    return parser
