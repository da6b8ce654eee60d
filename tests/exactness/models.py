"""Tiny models of every kind that engines treat differently: a config without weights or tokenizer.

In:  a name and a folder.   Out: a folder that vLLM and SGLang serve with the load format `dummy`.
"""

import json

WINDOW, FULL = "sliding_attention", "full_attention"

_COMMON = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 8192,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}


def _gemma(*layer_types):
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": len(layer_types),
        "layer_types": layer_types,
        "sliding_window": 64,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 32,
        "rope_local_base_freq": 10000.0,
    }


_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_act": "silu",
}
_GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "num_hidden_layers": 4,
    "layer_types": [WINDOW, FULL] * 2,
    "sliding_window": 64,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "hidden_act": "silu",
    "attention_bias": True,
    "swiglu_limit": 7.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 2.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
}
# SGLang keeps windows apart, and runs on a CPU: others need a GPU (docs/exactness.md).
_MELLUM = {
    "architectures": ["MellumForCausalLM"],
    "model_type": "mellum",
    "num_hidden_layers": 2,
    "layer_types": [WINDOW, FULL],
    "sliding_window": 64,
    "hidden_act": "silu",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "mlp_only_layers": [0, 1],
    "decoder_sparse_step": 1,
}
_MISTRAL = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "num_hidden_layers": 2,
    "sliding_window": 64,
    "hidden_act": "silu",
}
# Its convolutions keep states, which vLLM treats as Mamba's, and they run on a CPU.
_LFM2 = {
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "num_hidden_layers": 4,
    "layer_types": ["conv", FULL] * 2,
    "conv_L_cache": 3,
    "conv_bias": False,
    "conv_dim": 64,
    "conv_dim_out": 64,
    "conv_use_xavier_init": True,
    "use_pos_enc": True,
    "block_dim": 64,
    "block_ff_dim": 128,
    "block_multiple_of": 32,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
    "norm_eps": 1e-5,
    "num_heads": 2,
}

CONFIGS = {
    "plain": _LLAMA,
    "draft": {**_LLAMA, "num_hidden_layers": 1},
    "window-and-full": _gemma(WINDOW, FULL),
    "five-windows-and-full": _gemma(*[WINDOW] * 5, FULL),
    "gpt-oss": _GPT_OSS,
    "mellum": _MELLUM,
    "windows-only": _MISTRAL,
    "states-and-full": _LFM2,
}


def save_model(name, folder):
    """Write the model's config; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_COMMON | CONFIGS[name]))
    return folder
