"""The standalone router as a process, with as many descriptors as a test allows it.

In:  URLs or specifications of workers.   Out: a running router, its URL and its log.
"""

import asyncio
import contextlib
import os
import resource
import signal
import sys

START_LIMIT_S = 300.0  # the kernels may have to be compiled
STOP_LIMIT_S = 60.0


@contextlib.asynccontextmanager
async def router_process(*workers, limit, flags=(), env=None):
    """Yields its URL and the lines of its log so far; `limit` of descriptors, hard and soft."""
    async with started(*workers, limit=limit, flags=flags, env=env) as (process, url, lines):
        yield url, lines
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(STOP_LIMIT_S):
            assert await process.wait() == 0, "".join(lines[-20:])


@contextlib.asynccontextmanager
async def started(*workers, limit, flags=(), env=None):
    """The same, and the process, for who ends it: (process, url, lines)."""
    arguments = [argument for worker in workers for argument in ("--worker", worker)]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvplug.router", "--port", "0", *arguments, *flags),
        stderr=asyncio.subprocess.PIPE,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit)),
        env=env or {**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    lines = []
    try:
        async with asyncio.timeout(START_LIMIT_S):
            while not lines or "listening on" not in lines[-1]:
                lines.append((await process.stderr.readline()).decode())
                assert lines[-1], "".join(lines)
        reading = asyncio.create_task(_drain(process.stderr, lines))
        yield process, lines[-1].partition("listening on ")[2].partition(",")[0], lines
        await reading
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _drain(stream, lines):
    while line := await stream.readline():
        lines.append(line.decode())
