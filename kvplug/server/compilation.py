"""The compilation of the kernels, before the first request and the first event.

In:  whatever compiles.   Out: what is going on, in the log, where it takes more than a moment.

`python -m kvplug.router compile` does it ahead, for an image: a router that starts from it reads
its kernels from the cache.
"""

from __future__ import annotations

import importlib
import logging
import pkgutil
import sys
import threading
import time
from collections.abc import Callable

from kvplug import kernels

logger = logging.getLogger(__name__)

# Compiled kernels are loaded from Numba's cache in 0.3 s, all of them are compiled in 30. Whether
# there is a cache is seen only by trying.
_MOMENT_S = 2.0
_ANNOUNCEMENT = "compiling kernels: about half a minute the first time, from a cache after that"


def compile_kernels(
    compile_all: Callable[[], object] = kernels.compile_all, *, moment_s: float = _MOMENT_S
) -> None:
    """Compile what is imported; says so if it takes longer than a moment, and how long it took."""
    began_s = time.monotonic()
    announcement = threading.Timer(moment_s, logger.info, (_ANNOUNCEMENT,))
    announcement.start()
    try:
        compile_all()
    finally:
        announcement.cancel()
        announcement.join()  # two lines that cross each other would be read the wrong way round
    took_s = time.monotonic() - began_s
    if took_s >= moment_s:
        logger.info("kernels compiled in %.0f s", took_s)


def main(arguments: list[str]) -> int:
    """Compile all kernels into the cache; returns the exit code, 1 if they are not kept."""
    if arguments:
        sys.stderr.write(f"kvplug.router compile takes no arguments, got {' '.join(arguments)}\n")
        return 2
    for module in pkgutil.iter_modules(kernels.__path__):
        importlib.import_module(f"kvplug.kernels.{module.name}")
    began_s = time.monotonic()
    folders = kernels.compile_all()
    took_s = time.monotonic() - began_s
    if None in folders or not folders:
        sys.stderr.write(
            "the kernels compile, but no cache keeps them: NUMBA_CACHE_DIR must name a folder that "
            "can be written, and numba may not be disabled\n"
        )
        return 1
    where = ", ".join(sorted({folder for folder in folders if folder is not None}))
    sys.stdout.write(f"{len(folders)} kernels are in the cache after {took_s:.0f} s: {where}\n")
    return 0
