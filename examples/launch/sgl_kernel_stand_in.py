"""What stands in for `sgl_kernel` on a CPU without AMX: copied into SGLang's environment.

In:  the tensors of SGLang 0.5.23's scheduler.
Out: the one operation that it asks for by name; any other fails only when it is called.
"""

from collections.abc import Callable
from typing import Never

import torch  # type: ignore[import-not-found,unused-ignore]  # only the engine's environment has it

__version__ = "0.4.10"


def assign_req_to_token_pool_cpu(
    request_rows: torch.Tensor,
    token_slots: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    new_slots: torch.Tensor,
    *_: object,
) -> None:
    """Write each request's new cache slots, which lie one after the other, into its table row."""
    taken = 0
    for row, start, end in zip(request_rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        slots = new_slots[taken : taken + end - start]
        token_slots[row, start:end] = slots.to(token_slots.dtype)
        taken += end - start


def __getattr__(name: str) -> Callable[..., Never]:
    if name.startswith("__"):
        raise AttributeError(name)

    def fail(*_: object, **__: object) -> Never:
        raise NotImplementedError(f"sgl_kernel.{name} is not in kvplug's stand-in for the CPU")

    return fail
