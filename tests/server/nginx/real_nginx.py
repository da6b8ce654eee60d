"""The real nginx, as a process, with the configuration that the router writes."""

import asyncio
import contextlib
import os
import re
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


def directives(file):
    """Beside the file: in the foreground, and with workers of root if root starts it and the file
    names no user; nginx refuses a second one.
    """
    names_user = re.search(r"^user ", file.read_text(), re.MULTILINE) is not None
    return "daemon off;" if names_user or os.geteuid() != 0 else "daemon off; user root;"


async def checked(file):
    """What `nginx -t` says of the file, and whether it takes it."""
    command = (NGINX, "-t", "-e", "stderr", "-c", str(file), "-g", directives(file))
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    _, said = await process.communicate()
    return process.returncode == 0, said.decode()


@contextlib.asynccontextmanager
async def running(file, port):
    """nginx with this configuration, until it takes connections; yields the process."""
    command = (NGINX, "-e", "stderr", "-c", str(file), "-g", directives(file))
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
