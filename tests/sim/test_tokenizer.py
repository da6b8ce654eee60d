"""Text to token ids and back."""

import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from kvplug.errors import TokenizerError
from kvplug.sim.tokenizer import ByteTokenizer, FolderTokenizer
from kvplug.tokenization.prompt_tokenizer import PromptTokenizer

TEXT = "the quick brown fox jumps over the lazy dog and the cat sees the quick fox jump again"


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """A byte-level BPE with a chat template."""
    folder = tmp_path_factory.mktemp("model")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, show_progress=False, min_frequency=1
    )
    backend.train_from_iterator([TEXT], trainer)
    backend.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }} {% endfor %}"
    config = {"chat_template": template, "model_max_length": 512}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def folder_tokenizer(folder):
    return FolderTokenizer(PromptTokenizer.from_folder(folder), folder)


def test_bytes_are_tokens():
    tokenizer = ByteTokenizer()
    assert tokenizer.completion({"prompt": "hé"}) == [[104, 195, 169]]
    assert tokenizer.completion({"prompt": ["a", "b"]}) == [[97], [98]]
    assert tokenizer.completion({"prompt": [[1, 2], [3]]}) == [[1, 2], [3]]
    assert tokenizer.completion({"prompt": [1, 2]}) == [[1, 2]]
    messages = [{"role": "user", "content": "hi"}]
    assert bytes(tokenizer.chat({"messages": messages})) == b"<|user|>\nhi\n<|assistant|>\n"


@pytest.mark.parametrize(
    "prompt", [None, 3, [], [None], ["a", 1], [-1], [2**32], [True], [[1, "a"]]]
)
def test_prompts_that_make_no_sense_are_rejected(prompt):
    with pytest.raises(TokenizerError):
        ByteTokenizer().completion({"prompt": prompt})


@pytest.mark.parametrize("messages", [None, [], ["hi"], [{"role": "user"}], [{"content": "x"}]])
def test_conversations_that_make_no_sense_are_rejected(messages):
    with pytest.raises(TokenizerError):
        ByteTokenizer().chat({"messages": messages})


def test_a_folder_tokenizes_as_a_router_with_it(model_folder):
    tokenizer, of_router = folder_tokenizer(model_folder), PromptTokenizer.from_folder(model_folder)
    body = {"prompt": TEXT, "messages": [{"role": "user", "content": TEXT}]}
    assert tokenizer.completion(body) == [of_router.completion(body)[0].tolist()]
    assert tokenizer.chat(body) == of_router.chat(body).tolist()


@pytest.mark.parametrize("kind", ["bytes", "folder"])
def test_generated_text_is_encoded_to_the_tokens_that_it_was_made_of(kind, model_folder):
    tokenizer = ByteTokenizer() if kind == "bytes" else folder_tokenizer(model_folder)
    token_ids = list(tokenizer.vocabulary) + list(tokenizer.vocabulary)[::-1]
    assert len(set(token_ids)) > 5
    assert [*tokenizer.completion({"prompt": tokenizer.decode(token_ids)})[0]] == token_ids
