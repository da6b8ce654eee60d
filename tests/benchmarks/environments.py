"""Environments of the peers, made once and kept in the cache.

In:  a package and its version.   Out: the path of an interpreter that has it.
"""

from __future__ import annotations

import subprocess
import venv
from pathlib import Path

from examples.launch.cache_dir import cache_dir

DYNAMO = "ai-dynamo-runtime==1.6.1"


def cached_python(name: str, *packages: str) -> Path:
    """The interpreter of `venvs/name` in the cache, with these packages."""
    folder = cache_dir() / "venvs" / name
    python, ready = folder / "bin" / "python", folder / ".ready"
    if not ready.exists():
        venv.create(folder, with_pip=True, clear=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *packages], check=True)
        ready.touch()
    return python


def dynamo_python() -> Path:
    """Dynamo's binding."""
    return cached_python(DYNAMO.replace("==", "-"), DYNAMO)
