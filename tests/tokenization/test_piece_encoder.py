"""Token ids piece by piece are those of the whole text."""

import random
from functools import cache
from pydoc_data.topics import topics

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from kvplug.tokenization import piece_encoder
from kvplug.tokenization.piece_encoder import PieceEncoder, _cut

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def split_by(words):
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


LLAMA3, QWEN2 = sorted(piece_encoder._WORDS, key=len, reverse=True)
PRE_TOKENIZERS = {
    "gpt2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "llama3": split_by(LLAMA3),
    "qwen2": split_by(QWEN2),
}


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
    nfc = train(PRE_TOKENIZERS["qwen2"], normalizer=normalizers.NFC(), added=ADDED)
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
@given(parts=st.lists(words, max_size=60), with_special=st.booleans())
def test_pieces_give_the_ids_of_the_whole(backends, monkeypatch_piece, name, parts, with_special):
    text, backend = "".join(parts), backends[name]
    encoder = PieceEncoder(backend)
    assert encoder.cuts
    expected = backend.encode(text, add_special_tokens=with_special).ids
    for _ in range(2):  # the second time from memory
        assert (
            encoder.encode(text, with_special=with_special, max_new=len(text)).tolist() == expected
        )


@pytest.fixture(scope="module")
def monkeypatch_piece():
    """Pieces of a few characters, so that short texts are cut often."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(piece_encoder, "SMALL_CHARS", 3)
        patch.setattr(piece_encoder, "LARGE_CHARS", 9)
        yield


@pytest.mark.parametrize("name", [*PRE_TOKENIZERS, "added"])
def test_real_text_is_cut_and_a_shared_prefix_is_not_tokenized_again(backends, name):
    backend, encoder = backends[name], PieceEncoder(backends[name])
    long_text = "".join(topics[topic] for topic in sorted(topics)[:20])
    for end in random.Random(1).sample(range(20_000, len(long_text)), 10):
        text = long_text[:end] + " and something else"
        expected = backend.encode(text, add_special_tokens=True).ids
        assert encoder.encode(text, with_special=True, max_new=len(text)).tolist() == expected
    assert encoder.encode(text, with_special=True, max_new=0).tolist() == expected
    longer = long_text[:20_000] + "new " * 20
    assert encoder.encode(longer, with_special=True, max_new=0) is None
    assert encoder.encode(longer, with_special=True, max_new=1100) is not None


def test_what_is_too_long_to_tokenize_is_not_kept(backends):
    encoder, text = PieceEncoder(backends["gpt2"]), "one two three " * 50
    for _ in range(2):
        assert encoder.encode(text, with_special=False, max_new=len(text) - 1) is None
    assert encoder.encode(text, with_special=False, max_new=len(text)) is not None


def test_a_text_is_left_as_soon_as_too_much_of_it_is_new(backends, monkeypatch):
    num_cut = []

    def cut(text, size):
        for piece in _cut(text, size):
            num_cut.append(len(piece))
            yield piece

    monkeypatch.setattr(piece_encoder, "_cut", cut)
    encoder = PieceEncoder(backends["gpt2"])
    assert encoder.encode("one two " * 100_000, with_special=False, max_new=10_000) is None
    assert sum(num_cut) < 30_000  # each is cut twice


@pytest.mark.parametrize("size", ["SMALL", "LARGE"])
def test_only_so_many_pieces_are_kept(backends, monkeypatch, size):
    monkeypatch.setattr(piece_encoder, f"MAX_{size}", 3)
    monkeypatch.setattr(piece_encoder, "MAX_LARGE" if size == "SMALL" else "MAX_SMALL", 0)
    monkeypatch.setattr(piece_encoder, "LARGE_CHARS", 4)
    encoder = PieceEncoder(backends["gpt2"])
    texts = [f"text{number}" for number in range(5)]
    for text in [texts[0], *texts]:
        encoder.encode(text, with_special=False, max_new=5)
    known = [encoder.encode(text, with_special=False, max_new=0) is not None for text in texts]
    assert known == [False] * 2 + [True] * 3


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
def test_tokenizers_that_look_across_a_cut_get_the_whole_text(change):
    backend = Tokenizer.from_str(trained_gpt2())
    change(backend)
    encoder = PieceEncoder(backend)
    assert not encoder.cuts
    text = "in new york. and the end of it " * 100
    expected = backend.encode(text, add_special_tokens=True).ids
    assert encoder.encode(text, with_special=True, max_new=len(text)).tolist() == expected


def test_a_tokenizer_that_rolls_dice_is_asked_each_time():
    backend = Tokenizer.from_str(trained_gpt2())
    backend.model = BPE(dropout=0.1)
    assert not PieceEncoder(backend).cuts
