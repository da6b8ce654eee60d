"""Run by an engine's interpreter: a tiny LoRA adapter for the tiny model.

usage: python tiny_adapter.py FOLDER
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file


def save_adapter(folder):
    """Two layers of 64, as the model has them."""
    folder.mkdir(exist_ok=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 8,
        "lora_alpha": 16,
        "bias": "none",
        "target_modules": ["q_proj", "v_proj"],
        "base_model_name_or_path": "tiny",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    weights = {}
    for layer in range(2):
        for module in config["target_modules"]:
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            weights[f"{prefix}.lora_A.weight"] = torch.randn(8, 64) * 0.01
            weights[f"{prefix}.lora_B.weight"] = torch.randn(64, 8) * 0.01
    save_file(weights, folder / "adapter_model.safetensors")


if __name__ == "__main__":
    save_adapter(Path(sys.argv[1]))
