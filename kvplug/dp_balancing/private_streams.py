"""Event streams that nobody has asked for, between an engine's processes alone.

In:  nothing.
Out: the settings of a publisher, with endpoints in a folder that only this user can enter. The
     folder is removed when this process ends.

A path, and not a name in Linux's abstract namespace, which every user of the machine could open.
"""

from __future__ import annotations

import atexit
import os
import shutil

from kvplug.engines.binding import private_folder


def private_streams() -> dict[str, object]:
    """Fields of --kv-events-config, for vLLM and for SGLang."""
    folder = _new_folder()
    return {
        "publisher": "kvplug",
        "endpoint": f"ipc://{folder}/events",
        "replay_endpoint": f"ipc://{folder}/answers",
    }


def _new_folder() -> str:
    folder = private_folder()
    atexit.register(_remove, folder, os.getpid())
    return folder


def _remove(folder: str, owner: int) -> None:
    if os.getpid() == owner:  # not a child that has inherited the call
        shutil.rmtree(folder, ignore_errors=True)
