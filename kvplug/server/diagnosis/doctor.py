"""`python -m kvplug.router doctor`: what is wrong with a fleet, as a table.

In:  the URL of a running router, or workers to ask directly.
Out: a table; exit code 0 if nothing is found, 1 if something is, 2 if nobody could be asked.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import aiohttp
import msgspec

from kvplug.errors import ConfigError
from kvplug.router.config import RouterConfig
from kvplug.server.config import ServerConfig, WorkerSpec
from kvplug.server.diagnosis.direct import ask_directly
from kvplug.server.diagnosis.finding import Finding
from kvplug.server.diagnosis.table import table_of
from kvplug.server.upstream import Upstream

NOTHING, SOMETHING, UNREACHABLE = 0, 1, 2

_DEFAULT_URL = "http://127.0.0.1:8000"
_TIMEOUT_S = 10.0


class _Health(msgspec.Struct):
    findings: list[Finding]


def main(argv: Sequence[str]) -> int:
    """Ask, print, and say by the exit code."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    logging.getLogger("kvplug").addHandler(logging.NullHandler())  # the table says it all
    try:
        findings = asyncio.run(_findings(arguments))
    except ConfigError as error:
        parser.error(str(error))
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        reason = str(error) or type(error).__name__
        sys.stderr.write(f"doctor: no answer from a router at {arguments.url}: {reason}\n")
        return UNREACHABLE
    sys.stdout.write(table_of(findings) + "\n")
    return SOMETHING if findings else NOTHING


async def _findings(arguments: argparse.Namespace) -> list[Finding]:
    if not arguments.worker:
        return await _ask_router(arguments.url)
    config = ServerConfig(
        workers=tuple(map(WorkerSpec.parse, arguments.worker)),
        router=RouterConfig(block_size=arguments.block_size),
        tokenizer=arguments.tokenizer,
        worker_api_key_file=arguments.worker_api_key_file,
    )
    async with Upstream(config) as upstream:
        return await ask_directly(config, upstream.session)


async def _ask_router(url: str) -> list[Finding]:
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        # A fleet without a worker that is up answers 503, with the same body.
        session.get(url.rstrip("/") + "/health") as response,
    ):
        return msgspec.json.decode(await response.read(), type=_Health).findings


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kvplug.router doctor",
        description="What is wrong with a fleet, and the fix. Exit code 0: nothing is found, 1: "
        "something is, 2: the router could not be asked.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--url", default=_DEFAULT_URL, help="a running router, which knows most")
    form = "URL[,events=ENDPOINT][,topic=PREFIX]"
    text = "ask this engine instead of a router; repeat for each"
    add("--worker", action="append", default=[], metavar=form, help=text)
    text = "tokens per block that the router is to have; with --worker"
    add("--block-size", type=int, default=RouterConfig().block_size, help=text)
    text = "tokenizer.json and chat template; with --worker"
    add("--tokenizer", type=Path, metavar="FOLDER", help=text)
    text = "holds the key of engines that demand one; with --worker"
    add("--worker-api-key-file", type=Path, metavar="FILE", help=text)
    return parser
