"""The real nginx, as a process, with the configuration that the router writes."""

import asyncio
import contextlib
import os
import pwd
import shutil
import socket

import pytest

from tests.waiting import until

NGINX = shutil.which("nginx", path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin")
needs_nginx = pytest.mark.skipif(NGINX is None, reason="no nginx on this machine")


def free_port():
    """nginx takes no port 0."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def directives():
    """Beside the file: in the foreground, and with workers of this user if root starts it."""
    user = f"user {pwd.getpwuid(os.geteuid()).pw_name};" if os.geteuid() == 0 else ""
    return f"daemon off; {user}"


async def checked(file):
    """What `nginx -t` says of the file, and whether it takes it."""
    command = (NGINX, "-t", "-e", "stderr", "-c", str(file), "-g", directives())
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    _, said = await process.communicate()
    return process.returncode == 0, said.decode()


@contextlib.asynccontextmanager
async def running(file, port):
    """nginx with this configuration, until it takes connections; yields the process."""
    command = (NGINX, "-e", "stderr", "-c", str(file), "-g", directives())
    process = await asyncio.create_subprocess_exec(*command)
    try:
        await until(lambda: _accepts(port), "nginx listens")
        yield process
    finally:
        process.terminate()
        await process.wait()


def _accepts(port):
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0
