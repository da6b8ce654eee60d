"""Block hashes by vLLM itself. Runs in vLLM's interpreter, not in ours.

usage: python tests/engines/vllm_hash_vectors.py > tests/vectors/hashes/vllm-0.32.json

The tokens and extra keys of each case, and per algorithm and seed the digests of its full blocks.
"""

import json
import os
import sys

os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"

import torch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.request import Request

BLOCK_SIZE = 4
WIDE = [0, 23, 24, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 1, 2]
# (name, token ids, (LoRA name, path), salt, [(identifier, offset, length)], prompt embeds?)
CASES = [
    ("plain", list(range(1, 12)), None, None, [], False),
    ("no full block", [1, 2, 3], None, None, [], False),
    ("tokens of every width", WIDE, None, None, [], False),
    ("salt", list(range(1, 9)), None, "salt", [], False),
    ("LoRA", list(range(1, 9)), ("adapter", "/adapters/a"), None, [], False),
    ("LoRA named like its path", list(range(8)), ("a" * 30, "a" * 30), None, [], False),
    ("salt that is long, and no ASCII", list(range(8)), None, "Ü€" * 200, [], False),
    ("pictures", list(range(12)), None, None, [("cat", 1, 6), ("dog", 9, 2)], False),
    ("the same picture twice in a block", list(range(8)), None, None,
     [("cat" * 9, 0, 1), ("cat" * 9, 2, 1)], False),
    ("prompt embeds", list(range(8)), None, "salt", [], True),
    ("everything", list(range(12)), ("adapter", "/a"), "salt", [("cat", 2, 5)], True),
]  # fmt: skip
SEEDS = [None, "0", "4294967295", "a text"]
ALGORITHMS = ["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"]


def copied(text):
    """An object of its own, as each string that comes over the wire is."""
    return text and text.encode().decode()


def picture(identifier, offset, length):
    return MultiModalFeatureSpec(
        data=None,
        modality="image",
        identifier=copied(identifier),
        mm_position=PlaceholderRange(offset=offset, length=length),
    )


def request(token_ids, lora, salt, pictures, embeds, hash_blocks):
    return Request(
        request_id="0",
        prompt_token_ids=token_ids,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        prompt_embeds=torch.arange(2.0 * len(token_ids)).reshape(-1, 2) if embeds else None,
        lora_request=lora and LoRARequest(copied(lora[0]), 1, copied(lora[1])),
        cache_salt=copied(salt),
        mm_features=[picture(*each) for each in pictures],
        block_hasher=hash_blocks,
    )


def extra_keys(asked):
    """Pictures and embeds of each block, as events name them."""
    found = []
    for start in range(0, asked.num_tokens - BLOCK_SIZE + 1, BLOCK_SIZE):
        keys, _ = kv_cache_utils.generate_block_hash_extra_keys(asked, start, start + BLOCK_SIZE, 0)
        keys = [key for key in keys or () if key[0] in ("mm", "prompt_embeds")]
        found.append([{"hex": k[1].hex()} if k[0] == "prompt_embeds" else k[1:] for k in keys])
    return found


def digests(case, algorithm, seed):
    os.environ.pop("PYTHONHASHSEED", None)
    if seed is not None:
        os.environ["PYTHONHASHSEED"] = seed
    hash_fn = get_hash_fn_by_name(algorithm)
    kv_cache_utils.init_none_hash(hash_fn)
    hash_blocks = kv_cache_utils.get_request_block_hasher(BLOCK_SIZE, hash_fn)
    return request(*case[1:], hash_blocks).block_hashes


def vector(case):
    name, token_ids, lora, salt, *_ = case
    hashes = []
    for algorithm in ALGORITHMS:
        for seed in SEEDS:
            if seed is None and algorithm.startswith("xxhash"):
                continue  # a secret of each process
            found = digests(case, algorithm, seed)
            ids = [kv_cache_utils.maybe_convert_block_hash(digest) for digest in found]
            hexes = [digest.hex() for digest in found]
            hashes.append({"scheme": algorithm, "seed": seed, "digests": hexes, "ids": ids})
    keys = extra_keys(request(*case[1:], None))
    asked = {"token_ids": token_ids, "lora": lora, "salt": salt, "extra_keys": keys}
    return {"name": name, **asked, "hashes": hashes}


def main():
    sys.stdout.write(
        '{\n "engine": "vLLM 0.32.0",\n "how": "tests/engines/vllm_hash_vectors.py",\n'
    )
    sys.stdout.write(f' "block_size": {BLOCK_SIZE},\n "vectors": [\n  ')
    sys.stdout.write(",\n  ".join(json.dumps(vector(case)) for case in CASES))
    sys.stdout.write("\n ]\n}\n")


if __name__ == "__main__":
    main()
