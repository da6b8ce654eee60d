"""Hash schemes by name: what the blocks of a prefix are called.

In:  a name, a block size, what the scheme needs to know.   Out: an object with `sequence_hashes`.

    scheme_named("sha256_cbor", block_size=16, hash_seed="0").sequence_hashes(tokens)

| name           | whose hashes                     | LoRA, salt | extra keys of a block        |
|----------------|----------------------------------|------------|------------------------------|
| xxh3           | Dynamo's; the key of the index   | yes        | u64                          |
| fnv1a          | of a fork of vLLM's router       | no         | no                           |
| sha256         | vLLM's default                   | yes        | (identifier, offset), bytes  |
| sha256_cbor    | vLLM's, readable without Python  | yes        | (identifier, offset), bytes  |
| xxhash         | vLLM's, faster, no cryptography  | yes        | (identifier, offset), bytes  |
| xxhash_cbor    | both                             | yes        | (identifier, offset), bytes  |

In all of them a sequence hash is chained: it identifies the tokens from the first one on. What a
scheme does not define is refused, never left out.
"""

from kvplug.hash_schemes.named import SCHEME_NAMES, scheme_named
from kvplug.hash_schemes.scheme import ExtraKey, HashScheme

__all__ = ["SCHEME_NAMES", "ExtraKey", "HashScheme", "scheme_named"]
