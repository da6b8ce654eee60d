"""A command that does not outlive whoever started it.

In:  a folder for temporary files and a command line; standard input, a pipe that nobody writes to
and only the starter holds open.
Out: the command's exit status, or, once the pipe breaks, nothing: the whole group is killed, and
the folder removed.

PR_SET_PDEATHSIG would reach the command alone: engines start processes of their own, which would
stay behind. Run as a script by `child_process.py`, as the leader of a process group.
"""

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from types import FrameType


def kill_group_at_end_of_input(scratch: str) -> None:
    """Wait for the pipe to break, then take everything down, this process included."""
    while os.read(0, 4096):
        pass
    shutil.rmtree(scratch, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def run(command: Sequence[str]) -> int:
    """The command's exit status, as a shell would give it."""
    try:
        status = subprocess.Popen(command, stdin=subprocess.DEVNULL).wait()
    except OSError as error:
        print(f"cannot start {command[0]}: {error}", file=sys.stderr, flush=True)
        return 127
    return status if status >= 0 else 128 - status


def stay(signum: int, frame: FrameType | None) -> None:
    """Signals to the group are the command's business; this process leaves when the command has.

    A handler and not SIG_IGN, which the command would inherit.
    """


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, stay)
    signal.signal(signal.SIGINT, stay)
    scratch, *command = sys.argv[1:]
    threading.Thread(target=kill_group_at_end_of_input, args=(scratch,), daemon=True).start()
    # Not sys.exit: the interpreter would wait for nothing and might trip over the reading thread.
    os._exit(run(command))
