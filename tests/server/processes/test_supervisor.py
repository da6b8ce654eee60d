"""The supervisor: what it cannot start, and what is left when it is killed."""

import asyncio
import re
import socket
import subprocess
import sys

import psutil
import pytest

from tests.waiting import until

pytestmark = pytest.mark.slow
NOBODY = "http://127.0.0.1:9"
COMMAND = (sys.executable, "-m", "kvplug.router", "--processes", "2", "--worker", NOBODY)
LIMIT_S = 300.0  # the kernels may have to be compiled


def test_an_address_that_is_taken_is_one_sentence():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = subprocess.run(
            [*COMMAND, "--port", str(port)],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    assert ended.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in ended.stderr
    assert "Traceback" not in ended.stderr


async def test_a_killed_supervisor_takes_its_processes_along():
    supervisor = await asyncio.create_subprocess_exec(
        *COMMAND, "--port", "0", stderr=asyncio.subprocess.PIPE
    )
    try:
        pids, line = [], b" "
        async with asyncio.timeout(LIMIT_S):
            while b"listening on" not in line and line:
                line = await supervisor.stderr.readline()
                pids += map(int, re.findall(rb"process (\d+)\) is ready", line))
        assert len(pids) == 3
    finally:
        supervisor.kill()
        await supervisor.wait()
    await until(lambda: not any(map(is_running, pids)), "all have ended")


def is_running(pid):
    """Whether it is there, and not only waits to be noticed by its parent."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
