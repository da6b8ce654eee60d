"""The entry point: `python -m kvplug.sim`. See `--help`, or docs/simulation.md."""

import sys

from kvplug.sim.replay.cli import main

if __name__ == "__main__":
    sys.exit(main())
