"""What the tests of tokenization share: the folder of a model."""

import json
from pathlib import Path

VECTORS = Path(__file__).parent / "vectors"


def write_folder(folder, tokenizer, files):
    files = {"tokenizer.json": (VECTORS / tokenizer).read_text(encoding="utf-8"), **files}
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name).write_text(text, encoding="utf-8")
    return folder
