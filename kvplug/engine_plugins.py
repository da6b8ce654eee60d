"""The entry points of the plug-ins: what an engine calls in each of its processes.

In:  $KVPLUG_BALANCE.
Out: the publisher `kvplug`; with `kv`, the choice of data-parallel ranks, too.

What goes wrong is logged, and the engine goes on without it. Nothing here starts a thread or loads
Numba.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Final

from kvplug.engines import sglang, vllm
from kvplug.engines.settings import warn
from kvplug.errors import ConfigError

BALANCE: Final = "KVPLUG_BALANCE"
_BY_PREFIX_AND_LOAD: Final = "kv"


def register_in_vllm() -> None:
    """The entry point `vllm.general_plugins`."""
    vllm.register()
    _register_balancing(vllm.logger, "vLLM", _balance_vllm)


def register_in_sglang() -> None:
    """The entry point `sglang.srt.plugins`."""
    sglang.register()
    _register_balancing(sglang.logger, "SGLang", _balance_sglang)


def _register_balancing(logger: logging.Logger, engine: str, register: Callable[[], None]) -> None:
    try:
        if _is_wanted(os.environ.get(BALANCE, "")):
            register()
    except Exception as error:  # noqa: BLE001  # the engine's insides may have changed in any way
        warn(logger, f"{engine} balances its data-parallel ranks itself", error)


def _is_wanted(said: str) -> bool:
    if said not in ("", _BY_PREFIX_AND_LOAD):
        raise ConfigError(f"{BALANCE}: expected {_BY_PREFIX_AND_LOAD} or nothing, got {said!r}")
    return said == _BY_PREFIX_AND_LOAD


def _balance_vllm() -> None:
    from kvplug.dp_balancing.vllm import register

    register()


def _balance_sglang() -> None:
    from kvplug.dp_balancing.sglang import register

    register()
