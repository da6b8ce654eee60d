"""A tiny random Llama and a real tokenizer, made from nothing but what is installed.

In:  a folder's name.   Out: the folder, as `transformers` saves a model: every byte the same on
every run, so that engines that make their own agree.

Run as a script by the engine's interpreter; nothing of this project is imported.
The text that the model writes is noise; its tokenizer, template and KV cache are real.
"""

import os
import sys

# Set before the library is loaded: parallel training counts pairs in no fixed order.
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"

from pydoc_data.topics import topics

import tokenizers
import torch  # type: ignore[import-not-found,unused-ignore]  # only the engine's environment has it
import transformers  # type: ignore[import-not-found,unused-ignore]  # as torch

VOCAB_SIZE = 4096
MAX_POSITION = 8192
PAD, BOS, EOS = "<pad>", "<s>", "</s>"

CHAT_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|' + message['role'] + '|>\\n' + message['content'] + eos_token + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>\\n' }}
{%- endif %}"""


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
    """The tokenizer with its chat template, as `transformers` and engines load it."""
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=train_tokenizer(), bos_token=BOS, eos_token=EOS, pad_token=PAD
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


def save_model(folder: str) -> None:
    """Two layers of 64 with random weights."""
    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_POSITION,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


if __name__ == "__main__":
    save_tokenizer(sys.argv[1])
    save_model(sys.argv[1])
