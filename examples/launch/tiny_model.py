"""A tiny random Llama with a real tokenizer, made from nothing but what is installed.

In:  a folder's name.   Out: the folder, as `transformers` saves a model: every byte the same on
every run, so that engines that make their own agree.

Run as a script by the engine's interpreter, with tiny_tokenizer.py beside it.
The text that the model writes is noise; its tokenizer, template and KV cache are real.
"""

import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"

import torch  # type: ignore[import-not-found,unused-ignore]  # only the engine's environment has it
import transformers  # type: ignore[import-not-found,unused-ignore]  # as torch
from tiny_tokenizer import (  # type: ignore[import-not-found,unused-ignore]  # as a script's sibling
    MAX_POSITION,
    VOCAB_SIZE,
    save_tokenizer,
)


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
