"""Token ids piece by piece are those of the whole text."""

import random
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pydoc_data.topics import topics

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from kvplug.tokenization import cuts, piece_encoder
from kvplug.tokenization.piece_encoder import PieceEncoder, StoreOptions, _cut
from kvplug.tokenization.text_encoder import slow_encoder

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
KNOWN_WORDS = {
    **{f"words{number}": (words,) for number, words in enumerate(sorted(cuts._WORDS))},
    "deepseek": cuts._DEEPSEEK,
}
TINY = StoreOptions(piece_chars=3)  # so that short texts are cut often


def split_by(*words):
    return pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(each), "isolated") for each in words),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


PRE_TOKENIZERS = {
    "gpt2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    **{name: split_by(*words) for name, words in KNOWN_WORDS.items()},
}


def by(library, backend, options=None):
    """An encoder that uses this library, though the other one might be faster."""
    with pytest.MonkeyPatch.context() as patch:
        if library == "tokenizers":
            patch.setattr(
                piece_encoder, "text_encoder", lambda it: (slow_encoder(it), "tokenizers")
            )
        encoder = PieceEncoder(backend, options=options)
    if encoder.library != library:
        pytest.skip(f"{library} is not installed")
    return encoder


@cache
def trained_gpt2():
    return train(PRE_TOKENIZERS["gpt2"]).to_str()


def train(pre_tokenizer, *, normalizer=None, added=()):
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    trainer = BpeTrainer(
        vocab_size=1500, special_tokens=["<s>", "<|im_end|>"], initial_alphabet=ALPHABET,
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator([topics[name] for name in sorted(topics)[:30]], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer.add_tokens(list(added))
    return tokenizer


ADDED = (
    AddedToken("word", lstrip=True), AddedToken("only", single_word=True),
    AddedToken("<think>", rstrip=True), AddedToken("na\u00efve", normalized=True),
)  # fmt: skip


@pytest.fixture(scope="module")
def backends():
    plain = {name: train(each) for name, each in PRE_TOKENIZERS.items()}
    nfc = train(PRE_TOKENIZERS["words0"], normalizer=normalizers.NFC(), added=ADDED)
    return {**plain, "added": nfc}


words = st.sampled_from(
    [
        *("a", " a", " word", "word", " only", "only", "only ", "<think>", " <think> ", "<s>"),
        *(" ", "  ", "\n", " \n ", "\t", "'s", "'", " 12", "3456", "x1", ".", ", ", ") b", "naive"),
        *(
            "\u0308",
            " i\u0308ve",
            "na\u00efve",
            "漢字",
            "🙂",
            "\u2028",
            "Ab",
            "<|im_end|>",
            "im_end|>",
        ),
    ]
)


@pytest.mark.parametrize("name", [*PRE_TOKENIZERS, "added"])
@given(
    parts=st.lists(words, max_size=60),
    with_special=st.booleans(),
    library=st.sampled_from(["tokenizers", "fastokens"]),
)
def test_pieces_give_the_ids_of_the_whole(backends, name, parts, with_special, library):
    text, backend = "".join(parts), backends[name]
    encoder = PieceEncoder(backend, options=TINY)
    encoder = by(library, backend, TINY) if library == "tokenizers" else encoder
    assert encoder.cuts
    expected = backend.encode(text, add_special_tokens=with_special).ids
    for _ in range(2):  # the second time from memory
        assert (
            encoder.encode(text, with_special=with_special, max_new=len(text)).tolist() == expected
        )


@pytest.mark.parametrize(("library", "enough"), [("tokenizers", 1100), ("fastokens", 5000)])
@pytest.mark.parametrize("name", [*PRE_TOKENIZERS, "added"])
def test_real_text_is_cut_and_a_shared_prefix_is_not_tokenized_again(
    backends, name, library, enough
):
    backend, encoder = backends[name], by(library, backends[name])
    long_text = "".join(topics[topic] for topic in sorted(topics)[:20])
    for end in random.Random(1).sample(range(20_000, len(long_text)), 10):
        text = long_text[:end] + " and something else"
        expected = backend.encode(text, add_special_tokens=True).ids
        assert encoder.encode(text, with_special=True, max_new=len(text)).tolist() == expected
    assert encoder.encode(text, with_special=True, max_new=0).tolist() == expected
    longer = long_text[:20_000] + "new " * 20
    assert encoder.encode(longer, with_special=True, max_new=0) is None
    assert encoder.encode(longer, with_special=True, max_new=enough) is not None


def test_what_is_too_long_to_tokenize_is_not_kept(backends):
    encoder, text = PieceEncoder(backends["gpt2"]), "one two three " * 50
    for _ in range(2):
        assert encoder.encode(text, with_special=False, max_new=len(text) - 1) is None
    assert encoder.encode(text, with_special=False, max_new=len(text)) is not None


def test_a_text_is_left_as_soon_as_too_much_of_it_is_new(backends, monkeypatch):
    num_cut = []

    def cut(text, size, cut_at):
        for piece in _cut(text, size, cut_at):
            num_cut.append(len(piece))
            yield piece

    monkeypatch.setattr(piece_encoder, "_cut", cut)
    encoder = PieceEncoder(backends["gpt2"])
    assert encoder.encode("one two " * 100_000, with_special=False, max_new=10_000) is None
    assert sum(num_cut) < 30_000  # each is cut twice


def test_pieces_are_kept_within_their_bytes(backends):
    options = StoreOptions(piece_chars=16, max_bytes=20_000)
    encoder = PieceEncoder(backends["gpt2"], options=options)
    texts = [f"text number {number} " * 30 for number in range(60)]
    for text in texts:
        encoder.encode(text, with_special=False, max_new=len(text))
        assert 0 < encoder.num_bytes <= options.max_bytes
    known = [encoder.encode(text, with_special=False, max_new=0) is not None for text in texts]
    assert known[-1]
    assert not known[0]  # the one used longest ago went first


def test_what_was_known_is_counted(backends):
    encoder, text = PieceEncoder(backends["gpt2"]), "one two three " * 50
    for _ in range(2):
        encoder.encode(text, with_special=False, max_new=len(text))
    assert encoder.counts.num_texts == 2
    assert encoder.counts.num_chars == 2 * len(text)
    assert encoder.counts.num_chars_known == len(text)


def test_threads_share_the_pieces(backends):
    encoder = PieceEncoder(backends["gpt2"], options=StoreOptions(max_bytes=30_000))
    texts = ["".join(f"word {number * step} " for number in range(500)) for step in range(1, 9)]
    expected = [backends["gpt2"].encode(text, add_special_tokens=False).ids for text in texts]

    def encode(number):
        ids = encoder.encode(texts[number % 8], with_special=False, max_new=10**6)
        return ids.tolist() == expected[number % 8]

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(encode, range(160)))
    assert encoder.num_bytes == sum(
        piece_encoder._bytes_of(*each) for each in encoder._pieces._ids.items()
    )


@pytest.mark.parametrize(("min_overlap", "is_enough"), [(0.8, True), (0.95, False), (1.0, False)])
def test_a_known_beginning_can_stand_for_the_whole(backends, min_overlap, is_enough):
    options = StoreOptions(min_overlap=min_overlap)
    encoder, text = PieceEncoder(backends["gpt2"], options=options), "one two three " * 1000
    assert encoder.beginning(text, with_special=True) is None
    encoder.encode(text, with_special=True, max_new=len(text))
    longer = text + "four " * 250
    ids = encoder.beginning(longer, with_special=True)
    assert (ids is not None) == is_enough
    assert encoder.counts.num_texts_shortened == is_enough
    if ids is not None:
        exact = backends["gpt2"].encode(longer).ids
        assert 0.7 * len(exact) < len(ids) < len(exact)
        assert ids.tolist() == exact[: len(ids)]


def test_a_chat_of_any_language_is_cut_at_its_markers(backends):
    backend = backends["gpt2"]
    encoder = PieceEncoder(backend, options=TINY)
    first, second = ("<|im_end|>".join([text] * 9) for text in ("\u4e00" * 50, "\u4e01" * 50))
    for text in (first, first + "<|im_end|>" + second):
        ids = encoder.encode(text, with_special=False, max_new=10**6)
        assert ids.tolist() == backend.encode(text, add_special_tokens=False).ids
    assert encoder.counts.num_chars_known >= 0.8 * len(first)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)),
        lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.Metaspace()),
        lambda t: setattr(t, "pre_tokenizer", split_by(r"\w+ \w+|.")),
        lambda t: setattr(t, "normalizer", normalizers.Lowercase()),
        lambda t: t.add_tokens(["new york"]),
        lambda t: t.add_tokens([AddedToken("end", rstrip=True)]),
        lambda t: setattr(
            t,
            "post_processor",
            processors.TemplateProcessing(single="$A <s>", special_tokens=[("<s>", 0)]),
        ),
    ],
)
def test_tokenizers_that_look_across_a_place_are_not_cut_there(change):
    backend = Tokenizer.from_str(trained_gpt2())
    change(backend)
    encoder = PieceEncoder(backend, options=TINY)
    text = "in new york. and the end of it<|im_end|> all. " * 100
    for with_special in (False, True):
        expected = backend.encode(text, add_special_tokens=with_special).ids
        ids = encoder.encode(text, with_special=with_special, max_new=len(text))
        assert ids.tolist() == expected


def test_special_tokens_behind_a_text_leave_it_whole():
    backend = Tokenizer.from_str(trained_gpt2())
    backend.post_processor = processors.TemplateProcessing(
        single="$A <s>", special_tokens=[("<s>", 0)]
    )
    assert not PieceEncoder(backend).cuts


def test_special_tokens_that_are_to_be_text_are_no_markers():
    backend = Tokenizer.from_str(trained_gpt2())
    backend.encode_special_tokens = True
    encoder, text = PieceEncoder(backend, options=TINY), "one<|im_end|>two" * 20
    ids = encoder.encode(text, with_special=False, max_new=len(text))
    assert ids.tolist() == backend.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize(
    "token",
    [
        AddedToken("im_end|>x"),  # begins within the marker: no harm
        AddedToken("a<|im"),  # begins before it and reaches into it
        AddedToken("a<|im_end|>"),
        AddedToken("<|im_end|>", lstrip=True),
        AddedToken("<|im_end|>", single_word=True),
        AddedToken("\n<", normalized=False),
    ],
)
def test_a_marker_that_another_token_reaches_into_is_none(token):
    backend = Tokenizer.from_str(trained_gpt2())
    backend.add_tokens([token])
    encoder = PieceEncoder(backend, options=TINY)
    text = "one a<|im_end|>x a <|im_end|> a\n<|im_end|>two \n<s><s>a<|im " * 20
    ids = encoder.encode(text, with_special=False, max_new=len(text))
    assert ids.tolist() == backend.encode(text, add_special_tokens=False).ids


def test_a_tokenizer_that_rolls_dice_is_asked_each_time():
    backend = Tokenizer.from_str(trained_gpt2())
    backend.model = BPE(dropout=0.1)
    assert not PieceEncoder(backend).cuts
