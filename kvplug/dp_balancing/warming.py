"""The compilation of the kernels before the first request is routed.

In:  nothing.   Out: kernels that are compiled, from Numba's cache wherever there is one.

Compiling takes half a minute the first time on a machine and holds the interpreter lock, so a
process of its own does it, and the engine's front end finds the cache.
Run as `python -m kvplug.dp_balancing.warming`.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final

_LIMIT_S: Final = 600.0


def warm_up() -> None:
    """Compile in a process, then load; where that fails, compile here."""
    # What the engine found kvplug by need not be in the variables that a child inherits.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with suppress(OSError, subprocess.SubprocessError):
        subprocess.run(
            [sys.executable, "-P", "-m", __name__],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_LIMIT_S,
            check=False,
        )
    route_once()


def route_once() -> None:
    """Compile or load all kernels, and call those on the way of a request."""
    from kvplug.dp_balancing import chooser
    from kvplug.kernels import compile_all

    compile_all()
    chooser.rehearse()


def main() -> None:
    """What the process does; one at a time, as each front end of an engine starts one."""
    path = Path(tempfile.gettempdir()) / f"kvplug-warming-{os.getuid()}.lock"
    lock = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    route_once()


if __name__ == "__main__":
    main()
