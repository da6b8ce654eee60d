"""Block hashes by Dynamo itself. Runs in an environment with ai-dynamo-runtime 1.6.1, not in ours.

usage: python tests/engines/dynamo_hash_vectors.py > tests/vectors/hashes/dynamo-1.6.1.json
"""

import json
import sys

from dynamo.llm import compute_block_hash_for_seq

CASES = [
    {"token_ids": list(range(33)), "block_size": size, "bigrams": bigrams, "lora": lora,
     "salt": salt, "extra_keys": keys}
    for size in (1, 2, 4, 16, 32)
    for bigrams in (False, True)
    for lora, salt, keys in [
        ("", "", []), ("adapter", "", []), ("", "salt", []),
        ("adapter", "salt", [[7], [], [9, 2**64 - 1, 3]]),
    ]
]  # fmt: skip


def items(keys):
    return {"mm_objects": [{"mm_hash": key, "offsets": []} for key in keys]} if keys else None


def block_hashes(case):
    return compute_block_hash_for_seq(
        case["token_ids"],
        case["block_size"],
        [items(keys) for keys in case["extra_keys"]],
        lora_name=case["lora"],
        is_eagle=case["bigrams"],
        cache_namespace=case["salt"],
    )


def main():
    vectors = [json.dumps({**case, "block_hashes": block_hashes(case)}) for case in CASES]
    sys.stdout.write(
        '{\n "engine": "Dynamo 1.6.1",\n "how": "tests/engines/dynamo_hash_vectors.py",'
    )
    sys.stdout.write('\n "vectors": [\n  ' + ",\n  ".join(vectors) + "\n ]\n}\n")


if __name__ == "__main__":
    main()
