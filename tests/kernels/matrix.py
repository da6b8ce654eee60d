"""Run the kernel and index tests in every way that they must hold.

usage: python -m tests.kernels.matrix

Compiled on the newest numba is what `make test-fast` runs. Here: without JIT and with bounds checks
on the newest (this environment), and compiled on the oldest one that is supported, which is vLLM's
pin (an environment of its own, kept in the cache). Versions differ in what they make of a kernel:
as plain Python it does not depend on them, and what bounds checks find is an index of ours.
Each run gets a Numba cache of its own: cached code would hide a change of the settings. Two run at
a time; without JIT the state machines, which take longest, are a run of their own.
"""

import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.benchmarks.environments import cached_python

OLDEST_NUMBA = "0.65.0"
NUM_AT_A_TIME = 2
ROOT = Path(__file__).parents[2]
WITHOUT_JIT = {"NUMBA_DISABLE_JIT": "1", "KVPLUG_TEST_EXAMPLES": "30"}
WITH_BOUNDS_CHECKS = {"NUMBA_BOUNDSCHECK": "1"}
TESTS = ["tests/kernels", "tests/index", "tests/router/test_load.py", "tests/test_hashing.py"]
TESTS += ["tests/router/test_decider.py", "tests/router/test_cache_sizes.py"]
TESTS += ["tests/test_hash_schemes.py", "tests/test_records.py"]
MACHINES = sorted(
    str(path.relative_to(ROOT)) for path in (ROOT / "tests/index").glob("test_*_machine.py")
)
OTHERS = [*TESTS, *(f"--ignore={path}" for path in MACHINES)]


def oldest_python():
    """The interpreter of an environment with the oldest numba; made if it is not there yet."""
    packages = ["msgspec", "xxhash", "hypothesis", "pytest", "pytest-asyncio", "pytest-timeout"]
    name = f"numba-{OLDEST_NUMBA}-py{sys.version_info.minor}"
    return cached_python(name, f"numba=={OLDEST_NUMBA}", *packages)


def run(way):
    """(exit status, what it printed) of the tests in one way."""
    name, python, settings, tests = way
    with tempfile.TemporaryDirectory(prefix="numba-cache-") as cache:
        env = {**os.environ, "NUMBA_CACHE_DIR": cache, **settings}
        ask = "import numba; print(numba.__version__)"
        version = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True)
        command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
        ended = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
        title = f"kernels {name}, numba {version.stdout.strip()}:\n"
        return ended.returncode, title + ended.stdout + ended.stderr


def main():
    ways = [
        ("as state machines, without JIT", sys.executable, WITHOUT_JIT, MACHINES),
        ("without JIT", sys.executable, WITHOUT_JIT, OTHERS),
        ("with bounds checks", sys.executable, WITH_BOUNDS_CHECKS, TESTS),
        ("compiled", oldest_python(), {}, TESTS),
    ]
    codes = []
    with ThreadPoolExecutor(NUM_AT_A_TIME) as pool:
        for code, printed in pool.map(run, ways):
            sys.stdout.write(printed)
            sys.stdout.flush()
            codes.append(code)
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
