"""Block hashes equal vLLM 0.32's; the vectors were printed by tests/engines/vllm_pool_driver.py."""

import pytest

from kvplug.vllm_hashes import Lora, PrefixHasher, event_id

ADAPTER = Lora("adapter", "/adapters/a")


@pytest.mark.parametrize(
    ("salt", "lora", "ids"),
    [
        ("", None, [1882140585328457242, 15284023028817948126]),
        ("salt", None, [18183610505345561839, 6001179361055310018]),
        ("", ADAPTER, [17047058197245855040, 672501761989008079]),
        ("salt", ADAPTER, [8197481259880163249, 2516771667987564665]),
    ],
)
def test_ids_are_those_of_vllm(salt, lora, ids):
    digests = []
    PrefixHasher(4, lora, salt).extend(digests, range(1, 9))
    assert [event_id(digest) for digest in digests] == ids


def test_blocks_are_hashed_once_they_are_full():
    hasher, digests, tokens = PrefixHasher(4, None, ""), [], []
    for token_id in range(9):
        tokens.append(token_id)
        hasher.extend(digests, tokens)
        assert len(digests) == len(tokens) // 4
    whole = []
    PrefixHasher(4, None, "").extend(whole, tokens)
    assert digests == whole
