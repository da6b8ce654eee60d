"""The router behind a real nginx, as one program that is measured like any router.

In:  --port of nginx (0: a free one), flags of the router.   Out: both, until SIGTERM.

    python -m tests.benchmarks.nginx_router --port 0 --worker http://127.0.0.1:8101

nginx passes `/health` on, too, by which benchmarks see that a router is ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import tempfile
from pathlib import Path

from tests.server.nginx.real_nginx import free_port, running

_HEALTH = "location = /health { proxy_pass http://kvplug_router; }\n"


async def serve(port: int, flags: list[str], folder: Path) -> None:
    """Until SIGTERM or SIGINT."""
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    (folder / "nginx.d").mkdir()
    (folder / "nginx.d" / "health.conf").write_text(_HEALTH)
    file = folder / "nginx.conf"
    command = [sys.executable, "-m", "kvplug.router", *flags, "--port", "0"]
    command += ["--nginx-config", str(file), "--nginx-listen", f"127.0.0.1:{port}"]
    router = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    assert router.stderr is not None
    try:
        line = b""
        while b"listening on" not in line:
            line = await router.stderr.readline()
            sys.stderr.buffer.write(line)
            assert line, "the router did not start"
        passing_on = asyncio.create_task(_pass_on(router.stderr))
        async with running(file, port):
            sys.stderr.write(f"listening on http://127.0.0.1:{port},\n")
            await stopping.wait()
        passing_on.cancel()
    finally:
        with contextlib.suppress(ProcessLookupError):
            router.terminate()
        await router.wait()


async def _pass_on(stream: asyncio.StreamReader) -> None:
    while line := await stream.readline():
        sys.stderr.buffer.write(line)


def main() -> None:
    """As the command line says."""
    at = sys.argv.index("--port")
    port, flags = int(sys.argv[at + 1]), [*sys.argv[1:at], *sys.argv[at + 2 :]]
    with tempfile.TemporaryDirectory(prefix="kvplug-") as folder:
        asyncio.run(serve(port or free_port(), flags, Path(folder)))


if __name__ == "__main__":
    main()
