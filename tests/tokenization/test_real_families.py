"""The tokenizers of real models: pieces, and fastokens, give the ids of the whole text."""

from functools import cache
from pydoc_data.topics import topics

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from kvplug.tokenization.piece_encoder import PieceEncoder, StoreOptions
from tests.tokenization.families import FAMILIES, NotFetchedError, family_folder

pytestmark = pytest.mark.slow

# fastokens 0.3.5 has no NFKC.
BY_TOKENIZERS = {"claude"}


@cache
def family(name):
    try:
        file = family_folder(name) / "tokenizer.json"
    except NotFetchedError as error:
        pytest.skip(str(error))
    backend = Tokenizer.from_file(str(file))
    added = [token.content for token in backend.get_added_tokens_decoder().values()]
    return backend, PieceEncoder(backend, options=StoreOptions(piece_chars=2)), added


# fmt: off
AWKWARD = [
    "a", " a", " word", "only ", " ", "  ", "\n", " \n ", "\n\n\n", "\r\n", "\t", "'s", "'LL", "'",
    " 12", "3456", "x1", ".", ", ", ") b", "//\n", "Ab", "ABc", "naive", "na\u00efve", "e\u0301",
    "\u0308", " i\u0308ve", "漢字", "カタ\u309bカナ", "\u30fb", "。", "\uff0c", "한국어", "हि", "ก็",
    "\U0001f642", "\u2028", "\u3000", "\u00a0", "\u200b", "\x00", "ß", "\u01c5", "\u0661", "\ufe0f",
    "<", "<|", "|>", "\uff5c", "\u2581", "\u2581\u2581", "==", "im_end|>",
]
# fmt: on


@pytest.mark.parametrize("name", FAMILIES)
@given(draw=st.data(), with_special=st.booleans())
def test_ids_are_those_of_the_whole_text(name, draw, with_special):
    backend, encoder, added = family(name)
    piece = st.one_of(
        st.sampled_from(AWKWARD), st.sampled_from(AWKWARD), st.sampled_from(added), st.characters()
    )
    text = "".join(draw.draw(st.lists(piece, max_size=60)))
    expected = backend.encode(text, add_special_tokens=with_special).ids
    [whole, _] = encoder._tokenize([text, "x"], with_special=with_special)
    assert whole.tolist() == expected
    for _ in range(2):  # the second time from memory
        ids = encoder.encode(text, with_special=with_special, max_new=len(text))
        assert ids.tolist() == expected


@pytest.mark.parametrize("name", FAMILIES)
def test_a_next_turn_is_known_but_for_what_is_new(name):
    backend, encoder, _ = family(name)
    words = " ".join(topics[topic] for topic in sorted(topics)[:20])[:100_000]
    marker = next(token for token in backend.get_added_tokens_decoder().values() if token.special)
    chat = marker.content.join(words[start : start + 2000] for start in range(0, 100_000, 2000))
    for text in (chat, chat + marker.content + "and what is new " * 20):
        before = encoder.counts.num_chars_known
        ids = encoder.encode(text, with_special=False, max_new=len(text))
        assert ids.tolist() == backend.encode(text, add_special_tokens=False).ids
    assert encoder.counts.num_chars_known - before > len(chat) - 5000


@pytest.mark.parametrize("name", FAMILIES)
def test_which_library_tokenizes(name):
    pytest.importorskip("fastokens")
    _, encoder, _ = family(name)
    assert encoder.library == ("tokenizers" if name in BY_TOKENIZERS else "fastokens")
