"""What tests of a shared index start from."""

import pytest

from kvplug.shared.folder import OwnedFolder
from kvplug.shared.peers import make_files

NUM_PROCESSES = 2


@pytest.fixture
def folder(tmp_path):
    """A shared folder for two readers."""
    folder = OwnedFolder(tmp_path)
    make_files(folder, NUM_PROCESSES)
    yield folder
    folder.close()
