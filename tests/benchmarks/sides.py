"""Two programs measured in turns: each is a process in an environment of its own.

In:  for each side a command that answers JSON lines: a case in, an answer out (latencies in ns).
Out: answers per case and side, from interleaved rounds.

On small shared machines the speed drifts by tens of percent within a minute. Rounds of the two
sides alternate, so a drift hits both, and the ratio of medians holds where absolute times do not.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


class Side:
    """A long-lived process; `measure` runs one round of a case."""

    def __init__(self, name: str, command: list[str], env: dict[str, str]) -> None:
        self.name = name
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def measure(self, case: dict[str, Any]) -> Any:
        """Mostly latencies in nanoseconds."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(case) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"{self.name} ended with status {self._process.wait()}")
        return json.loads(answer)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)
        self._process.stdout.close()


def serve(measure: Callable[[dict[str, Any]], Any], lines: Iterable[str]) -> None:
    """The other end: answer every case on standard input."""
    for line in lines:
        print(json.dumps(measure(json.loads(line))), flush=True)  # noqa: T201 - the protocol
