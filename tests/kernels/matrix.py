"""Run the kernel and index tests in every way that they must hold.

usage: python -m tests.kernels.matrix

compiled, without JIT, and with bounds checks, on the newest numba (this environment) and on the
oldest one that is supported, which is vLLM's pin (an environment of its own, kept in the cache).
Each run gets a Numba cache of its own: cached code would hide a change of the settings.
"""

import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

OLDEST_NUMBA = "0.65.0"
ROOT = Path(__file__).parents[2]
WAYS = {
    "compiled": {},
    "without JIT": {"NUMBA_DISABLE_JIT": "1", "KVPLUG_TEST_EXAMPLES": "30"},
    "with bounds checks": {"NUMBA_BOUNDSCHECK": "1"},
}
TESTS = ["tests/kernels", "tests/index", "tests/router/test_load.py", "tests/test_hashing.py"]


def cache_dir():
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvplug"
    return Path(os.environ.get("KVPLUG_CACHE") or default)


def oldest_python():
    """The interpreter of an environment with the oldest numba; made if it is not there yet."""
    folder = cache_dir() / "venvs" / f"numba-{OLDEST_NUMBA}-py{sys.version_info.minor}"
    python, ready = folder / "bin" / "python", folder / ".ready"
    if not ready.exists():
        venv.create(folder, with_pip=True, clear=True)
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        packages = ["msgspec", "xxhash", "hypothesis", "pytest", "pytest-asyncio", "pytest-timeout"]
        subprocess.run([*pip, f"numba=={OLDEST_NUMBA}", *packages], check=True)
        ready.touch()
    return python


def run(python, name, settings):
    with tempfile.TemporaryDirectory(prefix="numba-cache-") as cache:
        env = {**os.environ, "NUMBA_CACHE_DIR": cache, **settings}
        ask = "import numba; print(numba.__version__)"
        version = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True)
        sys.stdout.write(f"kernels {name}, numba {version.stdout.strip()}: ")
        sys.stdout.flush()
        command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS]
        return subprocess.run(command, cwd=ROOT, env=env).returncode


def main():
    codes = [
        run(python, name, settings)
        for python in (sys.executable, oldest_python())
        for name, settings in WAYS.items()
    ]
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
