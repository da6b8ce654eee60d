"""What a diagnosis needs around it: a tokenizer's folder, a publisher of events."""

import pytest
import tokenizers

from tests.ingest.publisher import Publisher


def save_word_tokenizer(folder):
    """A tokenizer that no engine has; returns its folder."""
    words = tokenizers.models.WordLevel({"?": 0, "fox": 1, "quick": 2}, unk_token="?")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def tiny_tokenizer_dir(tmp_path):
    return save_word_tokenizer(tmp_path)


@pytest.fixture
def publisher():
    publisher = Publisher()
    yield publisher
    publisher.close()
    publisher.destroy()
