"""Every scheme against where it is from. Each file of tests/vectors/hashes says how it was made."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplug.errors import ConfigError, HashingError
from kvplug.events import Namespace
from kvplug.hash_schemes import SCHEME_NAMES, cbor, scheme_named
from kvplug.hash_schemes.vllm import ALGORITHMS
from kvplug.hashing import BlockHasher, as_tokens, seed_of
from kvplug.vllm_hashes import Lora, PrefixHasher
from tests.kernels import references

HASHES = Path(__file__).with_name("vectors") / "hashes"
SEEDS = dict.fromkeys(ALGORITHMS, "0")
token_lists = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def scheme_of(name, block_size=4, **how):
    return scheme_named(name, block_size=block_size, hash_seed=SEEDS.get(name), **how)


def load(stem):
    return json.loads((HASHES / f"{stem}.json").read_text())


VLLM = load("vllm-0.32")


def from_vllm():
    for vector in VLLM["vectors"]:
        for hashes in vector["hashes"]:
            marks = vector["name"], hashes["scheme"], str(hashes["seed"])
            yield pytest.param(vector, hashes, id=" / ".join(marks))


def key_of(key):
    return bytes.fromhex(key["hex"]) if isinstance(key, dict) else tuple(key)


@pytest.mark.parametrize(("vector", "hashes"), [*from_vllm()])
def test_equal_to_vllm_0_32_0(vector, hashes):
    lora, path = vector["lora"] or ("", "")
    scheme = scheme_named(
        hashes["scheme"],
        block_size=VLLM["block_size"],
        hash_seed=hashes["seed"],
        lora_paths={lora: path},
    )
    tokens, namespace = as_tokens(vector["token_ids"]), Namespace(lora, vector["salt"] or "")
    keys = [[key_of(key) for key in of_block] for of_block in vector["extra_keys"]]
    digests = scheme.digests(tokens, namespace, extra_keys=keys)
    assert [digest.hex() for digest in digests] == hashes["digests"]
    assert scheme.sequence_hashes(tokens, namespace, extra_keys=keys).tolist() == hashes["ids"]


@pytest.mark.parametrize("vector", load("dynamo-1.6.1")["vectors"])
def test_xxh3_is_equal_to_dynamo_1_6_1(vector):
    tokens, namespace = as_tokens(vector["token_ids"]), Namespace(vector["lora"], vector["salt"])
    size, bigrams = vector["block_size"], vector["bigrams"]
    hasher, keys = BlockHasher(size, bigrams=bigrams), vector["extra_keys"]
    hashes = hasher.block_hashes(tokens, seed_of(namespace), extra_keys=keys)
    assert hashes.tolist() == vector["block_hashes"]
    scheme = scheme_of("xxh3", size, bigrams=bigrams)
    chained = scheme.sequence_hashes(tokens, namespace, extra_keys=keys)
    assert chained.tolist() == references.chain_blocks(vector["block_hashes"], None, 1337)


@given(token_lists, st.none() | st.integers(0, 2**64 - 1))
def test_fnv1a_is_equal_to_its_formula(tokens, parent):
    hashes = scheme_of("fnv1a").sequence_hashes(as_tokens(tokens), parent=parent)
    assert hashes.tolist() == references.fnv1a(tokens, 4, parent or 0)


@pytest.mark.parametrize("name", SCHEME_NAMES)
@given(sequences=st.lists(token_lists, max_size=5), block_size=st.integers(1, 5))
def test_many_sequences_hash_as_each_alone(name, sequences, block_size):
    scheme = scheme_of(name, block_size)
    tokens, ends = as_tokens([t for s in sequences for t in s]), np.cumsum([*map(len, sequences)])
    many = scheme.sequence_hashes_many(tokens, ends.astype(np.int64))
    alone = [scheme.sequence_hashes(as_tokens(each)).tolist() for each in sequences]
    assert many.hashes.dtype == np.uint64
    assert many.ends.tolist() == np.cumsum([len(hashes) for hashes in alone]).tolist()
    assert many.hashes.tolist() == [h for hashes in alone for h in hashes]


@pytest.mark.parametrize("name", ["xxh3", *ALGORITHMS])
def test_many_sequences_have_namespaces_of_their_own(name):
    scheme, tokens = scheme_of(name), as_tokens([1, 2, 3, 4] * 2)
    namespaces = [Namespace(salt="a"), Namespace()]
    hashes, _ = scheme.sequence_hashes_many(tokens, np.array([4, 8]), namespaces)
    alone = [scheme.sequence_hashes(tokens[:4], each).tolist() for each in namespaces]
    assert [[h] for h in hashes.tolist()] == alone
    assert alone[0] != alone[1]


@pytest.mark.parametrize("name", SCHEME_NAMES)
@pytest.mark.parametrize("ends", [[1], [2, 1, 3], [-1, 3], [3, 4], [], [[3]], [1.0, 3.0]])
def test_ends_that_do_not_fit_the_tokens_are_rejected(name, ends):
    with pytest.raises(HashingError, match="ends of sequences"):
        scheme_of(name).sequence_hashes_many(as_tokens([1, 2, 3]), np.array(ends))


@pytest.mark.parametrize("name", SCHEME_NAMES)
def test_one_namespace_for_each_sequence_or_none(name):
    with pytest.raises(HashingError, match="expected 1 namespaces, got 2"):
        scheme_of(name).sequence_hashes_many(
            as_tokens([1]), np.array([1]), [Namespace(), Namespace()]
        )


NO_TOKENS = [
    ([1, 2, 3, 4], "list"),
    ((1, 2, 3, 4), "tuple"),
    (None, "NoneType"),
    ("1234", "str"),
    (b"1234", "bytes"),
    (np.uint32(1), "uint32"),
    *((np.ones(4, dtype=kind), f"{kind}(4,)") for kind in ("float64", "int64", "int32", "uint64")),
    *((np.ones(4, dtype=kind), f"{kind}(4,)") for kind in (">u4", "bool", "object")),
    *((np.ones(shape, dtype=np.uint32), f"uint32{shape}") for shape in ((), (2, 4), (0, 4))),
]


@pytest.mark.parametrize("name", SCHEME_NAMES)
@pytest.mark.parametrize(("tokens", "shown"), NO_TOKENS)
def test_tokens_that_are_no_uint32_in_a_row_are_rejected(name, tokens, shown):
    scheme = scheme_of(name)
    calls = [scheme.sequence_hashes, lambda it: scheme.sequence_hashes_many(it, np.array([4]))]
    for call in [*calls, *([scheme.digests] if name in ALGORITHMS else [])]:
        with pytest.raises(HashingError, match="expected an array of uint32 in a row") as rejected:
            call(tokens)
        assert str(rejected.value).endswith(f", got {shown}")


@pytest.mark.parametrize("name", SCHEME_NAMES)
def test_tokens_may_be_a_view_and_read_only(name):
    scheme, tokens = scheme_of(name), np.arange(16, dtype=np.uint32)
    tokens.flags.writeable = False
    expected = scheme.sequence_hashes(tokens[::2].copy()).tolist()
    assert scheme.sequence_hashes(tokens[::2]).tolist() == expected
    many = scheme.sequence_hashes_many(tokens[::2], np.array([8]))
    assert many.hashes.tolist() == expected


@pytest.mark.parametrize("name", SCHEME_NAMES)
@given(tokens=token_lists, num_blocks=st.integers(1, 5))
def test_a_continuation_hashes_as_the_whole(name, tokens, num_blocks):
    scheme, tokens = scheme_of(name), as_tokens(tokens)
    whole = scheme.sequence_hashes(tokens).tolist()
    prefixes = scheme.digests(tokens) if name in ALGORITHMS else whole
    num_blocks = min(num_blocks, len(whole))
    parent = prefixes[num_blocks - 1] if num_blocks else None
    rest = scheme.sequence_hashes(tokens[4 * num_blocks :], parent=parent)
    assert rest.tolist() == whole[num_blocks:]


@pytest.mark.parametrize("name", SCHEME_NAMES)
def test_parents_of_another_kind_are_rejected(name):
    others = [7] if name in ALGORITHMS else [-1, 2**64]
    for parent in [b"8 bytes.", b"", 1.5, float("nan"), "7", [], *others]:
        with pytest.raises(HashingError, match=f"{name} continues from a"):
            scheme_of(name).sequence_hashes(as_tokens(range(4)), parent=parent)


@pytest.mark.parametrize(
    ("name", "key"),
    [("xxh3", -1), ("xxh3", 2**64), ("xxh3", b"x"), ("xxh3", ("a", 1)), ("fnv1a", 7)]
    + [(name, key) for name in ALGORITHMS for key in (7, "a", ("a",), (1, "a"))]
    + [(name, key) for name in SCHEME_NAMES for key in (1.5, None, "", ("a", True), ("a", 2**63))],
)  # fmt: skip
def test_extra_keys_of_another_kind_are_rejected(name, key):
    with pytest.raises(HashingError, match=r"extra keys"):
        scheme_of(name).sequence_hashes(as_tokens(range(4)), extra_keys=[[key]])


@pytest.mark.parametrize("name", SCHEME_NAMES)
@pytest.mark.parametrize("keys", [None, 5, "ab", [None], [5], ["ab"], [b"x"], {0: [1]}])
def test_extra_keys_that_are_not_by_block_are_rejected(name, keys):
    with pytest.raises(HashingError, match="extra keys are sequences of keys, one a block, got"):
        scheme_of(name).sequence_hashes(as_tokens(range(4)), extra_keys=keys)


def test_digests_reject_the_same_extra_keys():
    with pytest.raises(HashingError, match=r"one a block, got \[7\]"):
        scheme_of("sha256").digests(as_tokens(range(4)), extra_keys=[7])


@pytest.mark.parametrize("namespace", [Namespace("adapter"), Namespace(salt="salt")])
def test_fnv1a_knows_no_namespace(namespace):
    with pytest.raises(HashingError, match="fnv1a knows tokens only"):
        scheme_of("fnv1a").sequence_hashes(as_tokens(range(4)), namespace)
    with pytest.raises(HashingError, match="fnv1a knows tokens only"):
        scheme_of("fnv1a").sequence_hashes_many(as_tokens(range(4)), np.array([4]), [namespace])


def test_an_adapter_of_an_unknown_path_is_rejected():
    with pytest.raises(HashingError, match="name that of 'b' in lora_paths"):
        scheme_of("sha256", lora_paths={"a": "/a"}).sequence_hashes(as_tokens([1]), Namespace("b"))


@pytest.mark.parametrize("name", ["md5", "", "SHA256", None, 5, b"xxh3", ["xxh3"]])
def test_an_unknown_name_is_rejected_with_the_known_ones(name):
    with pytest.raises(ConfigError) as rejected:
        scheme_named(name, block_size=4)
    known = "xxh3, fnv1a, sha256, sha256_cbor, xxhash, xxhash_cbor"
    assert str(rejected.value) == f"unknown hash scheme {name!r}, expected one of {known}"


@pytest.mark.parametrize("name", SCHEME_NAMES)
@pytest.mark.parametrize("size", [0, -1, 65537, 2**70, 1.5, 4.0, float("nan"), "16", None])
def test_a_block_size_that_is_none_is_rejected(name, size):
    with pytest.raises(ConfigError, match=r"block_size must be (in \[1, 65536\]|a whole number)"):
        scheme_of(name, size)


@pytest.mark.parametrize("name", SCHEME_NAMES)
def test_a_block_size_may_be_one_of_numpy(name):
    tokens = as_tokens(range(8))
    one, other = (scheme_of(name, size).sequence_hashes(tokens) for size in (4, np.int64(4)))
    assert one.tolist() == other.tolist()


@pytest.mark.parametrize(
    ("name", "how", "message"),
    [
        ("xxh3", {"hash_seed": "0"}, "xxh3 has no hash seed"),
        ("fnv1a", {"lora_paths": {"a": "b"}}, "fnv1a has no hash seed and no LoRA paths"),
        ("fnv1a", {"bigrams": True}, "fnv1a has no bigrams"),
        ("sha256", {"bigrams": True}, "sha256 has no bigrams"),
        ("xxhash_cbor", {}, "xxhash_cbor needs hash_seed"),
        ("sha256", {"block_size": 0}, "block_size must be in"),
        *(
            ("sha256", {"hash_seed": seed}, "hash_seed must be text or a whole number, got")
            for seed in (1.5, float("nan"), True, b"0", [1])
        ),
        *(
            ("sha256", {"lora_paths": paths}, "lora_paths maps adapter names to paths, got")
            for paths in ("a", ["a"], 5)
        ),
        *(
            ("sha256", {"lora_paths": paths}, "lora_paths maps text to text, got")
            for paths in ({"a": None}, {1: "a"}, {"a": b"x"}, {"a": Path("x")})
        ),
    ],
)
def test_settings_that_a_scheme_does_not_have_are_rejected(name, how, message):
    with pytest.raises(ConfigError, match=message):
        scheme_named(name, **{"block_size": 4, **how})


HALF_A_CHARACTER = r"cannot hash '\\ud800': expected Unicode"


def test_a_hash_seed_of_half_characters_is_rejected():
    with pytest.raises(HashingError, match=HALF_A_CHARACTER):
        scheme_named("sha256_cbor", block_size=4, hash_seed="\ud800")


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_path_of_half_characters_is_rejected(name):
    scheme = scheme_of(name, lora_paths={"a": "\ud800"})
    with pytest.raises(HashingError, match=HALF_A_CHARACTER):
        scheme.sequence_hashes(as_tokens(range(4)), Namespace("a"))


def test_a_hash_seed_may_be_a_number():
    tokens = as_tokens(range(4))
    named = [scheme_named("sha256", block_size=4, hash_seed=seed) for seed in (0, "0")]
    assert len({scheme.sequence_hashes(tokens)[0] for scheme in named}) == 1
    assert repr(named[0]) == "<VllmScheme sha256, block size 4>"


def test_the_simulated_engine_hashes_as_vllms_default():
    digests, tokens = [], list(range(12))
    PrefixHasher(4, Lora("a", "/a"), "salt").extend(digests, tokens)
    scheme = scheme_named("sha256", block_size=4, lora_paths={"a": "/a"})
    assert scheme.digests(as_tokens(tokens), Namespace("a", "salt")) == digests


@pytest.mark.parametrize(
    ("value", "encoded"),
    # RFC 8949, appendix A
    [
        (0, "00"), (23, "17"), (24, "1818"), (1000, "1903e8"), (1000000, "1a000f4240"),
        (1000000000000, "1b000000e8d4a51000"), (2**64 - 1, "1bffffffffffffffff"), (-1, "20"),
        (-1000, "3903e7"), (None, "f6"), (b"\1\2\3\4", "4401020304"), ("", "60"), ("ü", "62c3bc"),
        ((), "80"), ((1, (2, 3), (4, 5)), "8301820203820405"),
    ],
)  # fmt: skip
def test_cbor_is_that_of_the_rfc(value, encoded):
    assert cbor.dumps(value).hex() == encoded


@given(token_lists, st.integers(1, 30))
def test_token_arrays_are_cbor_of_the_blocks(tokens, block_size):
    blocks = [tokens[i : i + block_size] for i in range(0, len(tokens), block_size)]
    expected = [cbor.dumps(tuple(block)) for block in blocks if len(block) == block_size]
    assert cbor.token_arrays(as_tokens(tokens), block_size) == expected


@pytest.mark.parametrize("block_size", [23, 24, 255, 256, 65535, 65536])
def test_every_head_of_cbor(block_size):
    edges = [0, 23, 24, 255, 256, 65535, 65536, 2**32 - 1]
    tokens = (edges * (block_size // len(edges) + 1))[:block_size]
    assert cbor.token_arrays(as_tokens(tokens), block_size) == [cbor.dumps(tuple(tokens))]
