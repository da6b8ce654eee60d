"""SGLang for the CPU on disk, made once and kept.

In:  Python 3.11 and a package index.
Out: the path of an interpreter that has SGLang.

PyPI's SGLang is built for CUDA. Without a GPU three things stand in its way, and each is removed in
the environment alone: dependencies that are CUDA builds, torchvision's compiled operators, and
`sgl_kernel`, of which PyPI has no build for the CPU.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path

from examples.launch.cache_dir import cache_dir, locked
from examples.launch.engine_env import (
    KVPLUG_NEEDS,
    NATS,
    PYTHON_VERSION,
    add_later,
    find_base_python,
    install_torch,
    run_step,
)
from examples.launch.errors import LaunchError

SGLANG_VERSION = "0.5.23"
STAND_IN = Path(__file__).with_name("sgl_kernel_stand_in.py")

# As SGLang's package asks for it; the balancing of data-parallel ranks needs it.
NUMBA = "numba==0.65.1"

# Without their dependencies, which ask for CUDA builds; what of them is needed is listed below.
ALONE = (
    f"sglang=={SGLANG_VERSION}",
    "triton==3.9.0",
    "torchvision==0.28.0",
    "compressed-tensors==0.18.0",
    "xgrammar==0.2.7",
)
LIBRARIES = (
    *("numpy", "msgspec", "pyzmq", "pydantic", "orjson", "psutil", "pybase64", "requests"),
    *("pillow", "starlette", "packaging", "tqdm", "ipython", "aiohttp", "transformers==5.19.0"),
    *("dill", "apache-tvm-ffi==0.1.11", "sentencepiece", "loguru", "gguf", "openai==2.8.0"),
    *("partial_json_parser", "ninja", "setuptools==78.1.1"),
)
SERVER_LIBRARIES = (
    *("fastapi", "uvicorn", "uvloop", "python-multipart", "setproctitle", "kernels>=0.14.1,<0.15"),
    *("llguidance>=1.7.6,<2", "interegular", "tiktoken", "mistral_common", "watchfiles", "einops"),
    *("prometheus-client", "nvidia-ml-py", "zstandard", "openai-harmony==0.0.4", "anthropic"),
    *("distro", "easydict", "opentelemetry-api", "opentelemetry-sdk"),
    *("opentelemetry-exporter-otlp-proto-grpc", "jsonschema", "soundfile==0.13.1"),
)

# torchvision's compiled operators are for CUDA and do not load, but it refers to two of them by
# name while it is imported. Declared without a body, they are known and never called.
PATCHED_LINE = "import torchvision.extension  # noqa: F401\n"
PATCH = """
if not torchvision.extension._has_ops():
    _declared_by_kvplug = torch.library.Library("torchvision", "FRAGMENT")
    for _name in ("nms", "qnms"):
        _declared_by_kvplug.define(
            _name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        )
"""


def ensure_sglang() -> Path:
    """The interpreter of an environment with SGLang; made if it is not there yet."""
    folder = cache_dir() / "venvs" / f"sglang-{SGLANG_VERSION}"
    python, ready = folder / "bin" / "python", folder / ".ready"
    if all((folder / stamp).exists() for stamp in (".ready", ".numba", ".nats")):
        return python
    with locked(folder):
        if not ready.exists():
            _make_environment(folder, python)
            ready.touch()
        add_later(folder, python, "numba", [NUMBA])
        add_later(folder, python, "nats", NATS)
    return python


def _make_environment(folder: Path, python: Path) -> None:
    base = find_base_python(f"SGLang {SGLANG_VERSION}")
    print(
        f"Making an environment with SGLang {SGLANG_VERSION} in {folder}: once, 2.8 GB, "
        "a minute or two plus the download",
        flush=True,
    )
    # In place, and stamped last: as the environment of vLLM.
    shutil.rmtree(folder, ignore_errors=True)
    log_path = folder.with_name(f"{folder.name}.log")
    log_path.unlink(missing_ok=True)
    run_step("making the environment", [base, "-m", "venv", str(folder)], log_path)
    _install_sglang(python, log_path)
    site_packages = folder / "lib" / f"python{PYTHON_VERSION}" / "site-packages"
    _patch_torchvision(site_packages / "torchvision" / "_meta_registrations.py")
    (site_packages / "sgl_kernel").mkdir()
    shutil.copy(STAND_IN, site_packages / "sgl_kernel" / "__init__.py")


def _install_sglang(python: Path, log_path: Path) -> None:
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    install = [*pip, "install", "--progress-bar", "off"]
    install_torch(python, install, log_path)

    def add(what: str, packages: Sequence[str]) -> None:
        run_step(f"installing {what}", [*install, *packages], log_path)

    add("SGLang", ["--no-deps", *ALONE])
    add("SGLang's libraries", [*LIBRARIES, *SERVER_LIBRARIES, *KVPLUG_NEEDS])


def _patch_torchvision(module: Path) -> None:
    source = module.read_text()
    if source.count(PATCHED_LINE) != 1:
        raise LaunchError(f"{module} is not the torchvision that SGLang {SGLANG_VERSION} names")
    module.write_text(source.replace(PATCHED_LINE, PATCHED_LINE + PATCH))
