"""A folder of arrays: whose it is, who maps it, and what if there is no memory left."""

import numpy as np
import pytest

from kvplug.errors import SharedMemoryError
from kvplug.shared.folder import OwnedFolder, SharedFolder


def test_an_array_is_seen_by_who_opens_it_and_outlives_its_file(tmp_path):
    folder = OwnedFolder(tmp_path)
    written = folder.create("a", 4)
    seen = SharedFolder(folder.path).open("a")
    written[:] = [1, 2, 3, 4]
    folder.remove("a")
    written[0] = 9
    assert seen.tolist() == [9, 2, 3, 4]
    with pytest.raises(FileNotFoundError):
        folder.open("a")
    with pytest.raises(ValueError, match="read-only"):
        seen[0] = np.uint64(1)
    folder.close()
    assert not folder.path.exists()


def test_no_memory_is_one_sentence(tmp_path):
    folder = OwnedFolder(tmp_path)
    with pytest.raises(SharedMemoryError, match=r"cannot make a shared array of .* MiB in"):
        folder.create("a", 2**55)
    folder.close()


def test_a_lock_has_one_holder(tmp_path):
    folder = OwnedFolder(tmp_path)
    assert folder.lock("writer") is not None
    assert folder.lock("writer") is None
    folder.close()


def test_what_a_killed_owner_left_goes_with_the_next_and_what_is_in_use_stays(tmp_path):
    in_use, left = OwnedFolder(tmp_path), OwnedFolder(tmp_path)
    left.create("a", 4)
    left.unlock()
    following = OwnedFolder(tmp_path)
    assert not left.path.exists()
    assert in_use.path.exists()
    for folder in (in_use, following):
        folder.close()
