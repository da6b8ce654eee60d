"""Where the demo and the tests keep what is large and made once.

In:  $KVPLUG_CACHE, else $XDG_CACHE_HOME/kvplug, else ~/.cache/kvplug.
Out: folders there, and a lock so that two runs do not make the same thing at once.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def cache_dir() -> Path:
    """The folder that outlives the checkout."""
    chosen = os.environ.get("KVPLUG_CACHE")
    if chosen:
        return Path(chosen).expanduser().absolute()
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home).absolute() / "kvplug"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock; the kernel lets it go if this process is killed."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
