"""How long a step takes.

In:  what was scheduled: prompt tokens, sequences that decode.   Out: seconds.

    step = overhead + prefill tokens / prefill rate + (base + decodes * per sequence if any decode)

The time between two tokens of a sequence is one step: it grows with the batch, and with the
prefill chunks that share it.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvplug.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeModel:
    """The defaults are the order of an 8B model on one large GPU."""

    prefill_tokens_per_s: float = 20_000.0
    decode_base_s: float = 0.008
    decode_per_sequence_s: float = 0.0001
    step_overhead_s: float = 0.001

    def __post_init__(self) -> None:
        if not self.prefill_tokens_per_s > 0:
            raise ConfigError(
                f"prefill_tokens_per_s must be above 0, got {self.prefill_tokens_per_s}"
            )
        for name in ("decode_base_s", "decode_per_sequence_s", "step_overhead_s"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} must be at least 0, got {getattr(self, name)}")

    def step_s(self, *, num_prefill_tokens: int, num_decodes: int) -> float:
        """Seconds that one step takes."""
        decode_s = self.decode_base_s + self.decode_per_sequence_s * num_decodes
        prefill_s = num_prefill_tokens / self.prefill_tokens_per_s
        return self.step_overhead_s + prefill_s + (decode_s if num_decodes else 0.0)
