"""kvplug as `pip install` puts it beside an engine, in a folder of its own.

In:  an engine's interpreter, this checkout.
Out: a folder for PYTHONPATH, made anew when the sources change. The engine's environment stays as
it is, so one serves every checkout.
"""

import hashlib
import shutil
import tempfile
from pathlib import Path

from examples.launch.cache_dir import cache_dir, locked
from examples.launch.child_process import ChildProcess

ROOT = Path(__file__).parents[2]
INSTALL_LIMIT_S = 300.0


def ensure_plugin(python: Path) -> Path:
    """The folder with kvplug and its entry points."""
    folder = cache_dir() / "plugins" / f"kvplug-{_source_hash()}"
    with locked(folder):
        if not folder.exists():
            _install(python, folder)
    return folder


def _source_hash() -> str:
    digest = hashlib.sha256((ROOT / "pyproject.toml").read_bytes())
    for path in sorted((ROOT / "kvplug").rglob("*.py")):
        digest.update(path.relative_to(ROOT).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _install(python: Path, folder: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="kvplug-plugin-") as scratch:
        # A copy, because building leaves files behind; without isolation, because an engine's
        # environment has setuptools and nothing need be downloaded.
        source, target = Path(scratch) / "source", Path(scratch) / "target"
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "kvplug", source / "kvplug", ignore=ignore)
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, source)
        options = ["--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
        command = [str(python), "-m", "pip", "install", *options, "--target", str(target)]
        log_path = folder.with_name(f"{folder.name}.log")
        install = ChildProcess("installing kvplug", [*command, str(source)], log_path=log_path)
        install.run(timeout_s=INSTALL_LIMIT_S)
        shutil.copytree(target, folder)
