"""The compilation of the kernels, before the first request and the first event.

In:  whatever compiles.   Out: what is going on, in the log, where it takes more than a moment.
"""

from __future__ import annotations

import logging
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
    compile_all: Callable[[], None] = kernels.compile_all, *, moment_s: float = _MOMENT_S
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
