"""Messages to begin with: the captured ones, and a fleet's worth of generated ones.

In:  tests/vectors, a random generator.   Out: payloads, and batches as msgpack values.
"""

import json
from pathlib import Path

import msgspec

VECTORS = Path(__file__).parents[1] / "vectors"
BLOCK_SIZE = 4
_NUM_CHAINS, _CHAIN_LENGTH = 12, 8
_STATES = ("local_gpu", "cxl_pooled", "cxl_pooled", "in_transit", "evicted")
_WORKERS = ("fed", "bystander", "nobody")
_MEDIA = ("GPU", "GPU", "GPU", "CPU", "STORAGE", "CXL", "tape", None)


def captured():
    """The payloads of every dialect."""
    return [
        bytes.fromhex(vector["payload"])
        for path in sorted(VECTORS.glob("*.json"))
        for vector in json.loads(path.read_text())["vectors"]
    ]


def generated(rng):
    """A batch of one to three valid events; names and contents always go together."""
    events = [rng.choice(_MAKERS)(rng) for _ in range(rng.randrange(1, 4))]
    return [12.5, events, rng.choice((0, 0, 0, 1, None))]


def cleared():
    """The payload of a batch that empties the rank."""
    return msgspec.msgpack.encode([12.5, [{"type": "AllBlocksCleared"}], 0])


def _stored(rng):
    chain, start = rng.randrange(_NUM_CHAINS), rng.randrange(_CHAIN_LENGTH)
    num_blocks = rng.randrange(1, _CHAIN_LENGTH - start + 1)
    names = [_name(chain, start + i) for i in range(num_blocks)]
    parent = _name(chain, start - 1) if start else None
    tokens = [_token(chain, start, i) for i in range(num_blocks * BLOCK_SIZE)]
    fields = {
        "block_hashes": names,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": BLOCK_SIZE,
        "lora_id": None,
        "medium": rng.choice(_MEDIA),
    }
    return _written("BlockStored", fields, rng)


def _removed(rng):
    chain, start = rng.randrange(_NUM_CHAINS), rng.randrange(_CHAIN_LENGTH)
    fields = {"block_hashes": [_name(chain, start)], "medium": rng.choice(_MEDIA)}
    return _written("BlockRemoved", fields, rng)


def _copied(rng):
    name = _name(rng.randrange(_NUM_CHAINS), rng.randrange(_CHAIN_LENGTH))
    fields = {"block_hashes": [name], "parent_block_hash": None, "token_ids": [], "block_size": 0}
    return _written("BlockStored", fields | {"lora_id": None, "medium": "CPU"}, rng)


def _moved(rng):
    name = _name(rng.randrange(_NUM_CHAINS), rng.randrange(_CHAIN_LENGTH))
    place = {"pool_id": rng.randrange(3), "accessible_workers": rng.sample(_WORKERS, 1)}
    move = {"type": "CxlStateTransition", "block_hashes": [name], "new_state": rng.choice(_STATES)}
    return move | (place if rng.random() < 0.7 else {})


_MAKERS = (_stored, _stored, _stored, _stored, _removed, _removed, _copied, _moved)


def _name(chain, position):
    return (chain * 1000 + position + 1) * 0x9E3779B97F4A7C15 % 2**64


def _token(chain, start, i):
    return chain * 100_000 + start * BLOCK_SIZE + i


def _written(kind, fields, rng):
    """As a map or an array, with hashes as vLLM, SGLang or a digest has them."""
    form = rng.choice((_unsigned, _unsigned, _signed, _digest))
    fields = fields | {"block_hashes": [form(name) for name in fields["block_hashes"]]}
    if fields.get("parent_block_hash") is not None:
        fields["parent_block_hash"] = form(fields["parent_block_hash"])
    return {"type": kind, **fields} if rng.random() < 0.7 else [kind, *fields.values()]


def _unsigned(name):
    return name


def _signed(name):
    return name - 2**64 if name >= 2**63 else name


def _digest(name):
    return bytes(24) + name.to_bytes(8, "big")
