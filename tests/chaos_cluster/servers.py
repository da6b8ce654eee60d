"""NATS servers of a run, whose disk can fill up and whose store can be an old one.

In:  how many nodes, the size of their disk.   Out: tests.nats_servers.Node, and what is done to
their stores.
"""

import os
import shutil
import subprocess
import tempfile
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.nats_servers import nats_servers

DISK_MB = 24
# A reader with more than that in the server's buffer is cut off.
MAX_PENDING = "max_pending: 1MB"
_FILLER = "filler"


def can_mount():
    """Whether a disk of its own can be had, for one that is full."""
    return os.geteuid() == 0 and shutil.which("mount") is not None and _mounts()


def _mounts():
    with tempfile.TemporaryDirectory() as folder:
        made = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=1M", "tmpfs", folder],
            capture_output=True,
            check=False,
        )
        if made.returncode == 0:
            subprocess.run(["umount", folder], check=False)
        return made.returncode == 0


class Servers:
    """nodes; save and bring_back a store, fill and free a disk. The last two need a small disk."""

    def __init__(self, nodes, folder):
        self.nodes, self._folder = nodes, folder

    @property
    def store(self):
        return self.nodes[0].store

    def save(self):
        """Keep a copy of the store as it is now; the server is stopped for it."""
        node = self.nodes[0]
        node.stop()
        self._saved = self._folder / "saved"
        shutil.rmtree(self._saved, ignore_errors=True)
        shutil.copytree(node.store, self._saved)
        node.start()

    def bring_back(self):
        """Kill the server, and start it with the store that was kept."""
        node = self.nodes[0]
        node.kill()
        for each in node.store.iterdir():
            shutil.rmtree(each)
        shutil.copytree(self._saved, node.store, dirs_exist_ok=True)
        node.start()

    def fill_disk(self):
        with (self.store / _FILLER).open("wb", buffering=0) as filler:
            chunk = bytes(2**16)
            while chunk:
                try:
                    filler.write(chunk)
                except OSError:
                    chunk = chunk[: len(chunk) // 2]

    def free_disk(self):
        (self.store / _FILLER).unlink()


@contextmanager
def servers(num_nodes, *, has_small_disk=False):
    """Servers that run; MAX_PENDING holds for all of them."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-nats-")))
        mount = _small_disk if has_small_disk else None
        nodes = stack.enter_context(nats_servers(num_nodes, MAX_PENDING, prepare=mount))
        yield Servers(nodes, folder)


@contextmanager
def _small_disk(store):
    store.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}M", "tmpfs", str(store)]
    subprocess.run(command, check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(store)], check=True)
