"""A tiny LoRA adapter for the tiny model, made without PyTorch, which takes seconds to import.

In:  a folder, which need not be there.   Out: the files of the adapter in it.
"""

import json

import numpy as np

_PROJECTIONS = ("q_proj", "v_proj")
_RANK, _HIDDEN_SIZE, _NUM_LAYERS = 8, 64, 2


def save_adapter(folder):
    folder.mkdir(exist_ok=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": _RANK,
        "lora_alpha": 16,
        "bias": "none",
        "target_modules": _PROJECTIONS,
        "base_model_name_or_path": "tiny",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    _save_tensors(folder / "adapter_model.safetensors", _weights())


def _weights():
    random, weights = np.random.default_rng(1), {}
    for layer in range(_NUM_LAYERS):
        for projection in _PROJECTIONS:
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{projection}"
            for part, shape in (("A", (_RANK, _HIDDEN_SIZE)), ("B", (_HIDDEN_SIZE, _RANK))):
                weight = random.standard_normal(shape, np.float32) * np.float32(0.01)
                weights[f"{prefix}.lora_{part}.weight"] = weight
    return weights


def _save_tensors(path, tensors):
    """The format of safetensors: the size of a header, the header in JSON, the tensors."""
    header, end = {}, 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": "F32", "shape": tensor.shape, "data_offsets": (begin, end)}
    encoded = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for tensor in tensors.values():
            file.write(tensor.tobytes())
