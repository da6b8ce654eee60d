"""A real tokenizer, trained on what every Python has: its own documentation.

In:  a folder's name.   Out: tokenizer.json and tokenizer_config.json with a chat template, every
byte the same on every run, as `transformers` and engines load them.

Imported for simulated engines, and by tiny_model.py in the engine's interpreter;
nothing of this project is imported.
"""

import json
import os
from pathlib import Path
from pydoc_data.topics import topics

# Set before the library is loaded: parallel training counts pairs in no fixed order.
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import tokenizers

VOCAB_SIZE, MAX_POSITION = 4096, 8192
PAD, BOS, EOS = "<pad>", "<s>", "</s>"

CHAT_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|' + message['role'] + '|>\\n' + message['content'] + eos_token + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>\\n' }}
{%- endif %}"""
CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": BOS,
    "eos_token": EOS,
    "pad_token": PAD,
    "model_max_length": MAX_POSITION,
    "clean_up_tokenization_spaces": False,
    "chat_template": CHAT_TEMPLATE,
}


def train_tokenizer() -> tokenizers.Tokenizer:
    """Byte-level BPE over Python's own documentation; it starts every text with the BOS token."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, BOS, EOS, "<|system|>", "<|user|>", "<|assistant|>"],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((topics[name] for name in sorted(topics)), trainer)
    # As real Llamas do: whoever renders the chat template, which brings a BOS of its own, must
    # then encode without special tokens, or it counts and hashes one token too many.
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, 1)]
    )
    return tokenizer


def save_tokenizer(folder: str) -> None:
    """Write the two files; the folder is made."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    train_tokenizer().save(str(Path(folder) / "tokenizer.json"))
    (Path(folder) / "tokenizer_config.json").write_text(json.dumps(CONFIG, indent=1) + "\n")
