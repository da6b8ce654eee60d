"""A program that does its work and ends, started ahead of the test that looks at what came of it.

In:  a command and its environment.   Out: its output, once it has ended well.
"""

from examples.launch.child_process import ChildProcess
from tests.plugins.stock_client import wait_until

LIMIT_S = 600.0


class Program:
    """An engine to EnginePool, ready when it has ended."""

    def __init__(self, name, command, folder, *, env):
        self._process = ChildProcess(
            name, [str(each) for each in command], log_path=folder / f"{name}.log", env=env
        )

    def start(self):
        self._process.start()

    def wait_ready(self):
        process = self._process
        wait_until(lambda: process.exit_status is not None, "it has ended", timeout_s=LIMIT_S)
        assert process.exit_status == 0, process.log_tail()

    def stop(self):
        self._process.stop()

    def output(self):
        """What it wrote, on both streams."""
        return self._process.log_path.read_text(errors="replace")
