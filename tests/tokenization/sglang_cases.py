"""Bodies whose prompts an installed SGLang was asked for: those of the vectors of vLLM.

The ids that it gave are in vectors/apis/sglang.json, by name; null for a body that it refuses.
"""

import json

from tests.tokenization.conftest import VECTORS, write_folder
from tests.tokenization.other_apis import bodies

IDS_FILE = VECTORS / "apis" / "sglang.json"
CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
# One whose template prints what it gets, one that reads parts, one with thinking and tools.
OTHER_APIS = ("dump", "dump_parts", "chatml")


def families():
    """By name, what the folder of a model has."""
    for path in sorted(VECTORS.glob("*.json")):
        vectors = json.loads(path.read_text(encoding="utf-8"))
        if "files" in vectors:
            yield path.stem, vectors


def write_models(folder):
    """A folder for each family."""
    for family, vectors in families():
        files = {"config.json": CONFIG, **vectors["files"]}
        write_folder(folder / family, vectors["tokenizer"], files)


def cases():
    """Name, family, kind and body."""
    for family, vectors in families():
        for kind in ("chat", "completion"):
            for case in vectors[kind]:
                yield f"{family}-{kind}-{case['name']}", family, kind, case["body"]
        if family in OTHER_APIS:
            for kind, name, body in bodies():
                yield f"{family}-{kind}-{name}", family, kind, body
