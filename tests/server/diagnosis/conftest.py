"""What a diagnosis needs around it: a tokenizer's folder, a publisher of events."""

import pytest
import tokenizers

from tests.ingest.publisher import Publisher


@pytest.fixture
def tiny_tokenizer_dir(tmp_path):
    words = tokenizers.models.WordLevel({"?": 0, "fox": 1, "quick": 2}, unk_token="?")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.fixture
def publisher():
    publisher = Publisher()
    yield publisher
    publisher.close()
    publisher.destroy()
