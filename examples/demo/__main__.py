"""The entry point: `python -m examples.demo`.

In:  the command line.
Out: a table; exit code 0, 1 with a sentence if something went wrong, 2 for a wrong flag, 130 or
143 if it was stopped.
"""

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from examples.demo.stop_signals import StopSignals
from examples.launch.errors import LaunchError

ENGINES = ("sim", "vllm", "sglang")
PLOT = Path("bench-results") / "demo.png"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit code."""
    stop_signals = StopSignals()
    stop_signals.listen()
    try:
        arguments = parse(argv)
        return demo(arguments.engine, arguments.requests, stop_signals)
    except KeyboardInterrupt:
        stop_signals.ignore()
        print(f"stopped by {stop_signals.name}", file=sys.stderr)
        return stop_signals.exit_code
    except (LaunchError, OSError) as error:
        print(f"the demo cannot go on: {error}", file=sys.stderr)
        return 1


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags; argparse ends the program with exit code 2 if they are wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.demo",
        description="Some engines, the same requests under two policies, one table and a plot.",
    )
    parser.add_argument(
        "--engine",
        choices=ENGINES,
        default=ENGINES[0],
        help="sim: four simulated ones (default); vllm, sglang: two real ones on the CPU",
    )
    parser.add_argument(
        "--requests",
        type=positive,
        metavar="N",
        help="requests for each policy (default: what suits the engines)",
    )
    return parser.parse_args(argv)


def positive(text: str) -> int:
    """A count of at least one."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def demo(kind: str, num_requests: int | None, stop_signals: StopSignals) -> int:
    """Run the comparison, and stop all that it started, whatever happens."""
    # Imported late: these take most of a second, in which Ctrl-C would end in a traceback.
    from rich.console import Console

    from examples.demo import comparison
    from examples.demo.plot import save_plot

    console = Console()
    log_dir = Path(tempfile.mkdtemp(prefix="kvplug-demo-"))
    try:
        with ExitStack() as cleanup:
            try:
                results = comparison.run(
                    kind, num_requests, log_dir=log_dir, console=console, cleanup=cleanup
                )
            finally:
                stop_signals.ignore()
    except KeyboardInterrupt:
        shutil.rmtree(log_dir)
        raise
    if any(result.failed for result in results):
        raise LaunchError(f"not every request was answered; the logs are in {log_dir}")
    shutil.rmtree(log_dir)
    PLOT.parent.mkdir(exist_ok=True)
    save_plot(results, f"{len(results[0].outcomes)} requests, engines: {kind}", PLOT)
    console.print(f"The plot is in {PLOT}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
