"""The fuzzer with atheris choosing the damage: it keeps what reaches new code.

In:  a time; `pip install atheris` first, it is no dependency.   Out: 0 if every rule held.

Bytes only, so it is slower to leave a good batch than `run`, and better at the corners of the
decoder. The corpus of one run is thrown away with it.
"""

import argparse
import importlib.util
import logging
import random
import sys
import tempfile
from pathlib import Path

from tests.fuzz import corpus


def main():
    """Run, or say by name what is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=60)
    arguments = parser.parse_args()
    if importlib.util.find_spec("atheris") is None:
        print("skipped: atheris is not installed (pip install atheris)")
        return
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as folder:
        for number, payload in enumerate(corpus.captured()):
            (Path(folder) / str(number)).write_bytes(payload)
        _fuzz([f"-max_total_time={arguments.seconds}", "-max_len=4096", "-verbosity=1", folder])


def _fuzz(options):
    import atheris

    importlib.import_module("kvplug.router.core")  # Numba cannot read what atheris has rewritten
    with atheris.instrument_imports(include=["kvplug.codec", "kvplug.dialects", "kvplug.wire"]):
        from tests.fuzz.target import FollowerTarget

    target = FollowerTarget(random.Random(1))
    numbers = iter(range(2**63))

    def read(payload):
        frames = [b"kv@pod@model", next(numbers).to_bytes(8, "big"), payload]
        target.feed(frames)

    atheris.Setup([sys.argv[0], *options], read)
    atheris.Fuzz()  # ends the process


if __name__ == "__main__":
    main()
