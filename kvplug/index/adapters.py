"""Which namespaces are those of a LoRA adapter.

In:  the namespaces that events name.   Out: their seeds, by the adapter's name; the adapter of a
seed.

vLLM (0.32) hashes the path of an adapter, too, but publishes the name alone. Loaded again from
another path, the adapter has other engine hashes for equal blocks, and those of before are of no
use any more. What is kept here finds them: an index remembers blocks by the seed of their
namespace, and each salt makes another one.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from kvplug.events import Namespace
from kvplug.hashing import seed_of
from kvplug.index.block_store import BlockStore
from kvplug.kernels import runs

U64 = npt.NDArray[np.uint64]

# Of an entry of a dict, with the seed's int.
_NBYTES_PER_SEED = 160
_MIN_SEEDS = 1024


class AdapterSeeds:
    """note; of an adapter, adapter_of a seed. Seeds of which no block is left are forgotten."""

    def __init__(self, block_store: BlockStore) -> None:
        self._block_store = block_store
        self._adapter_of: dict[int, str] = {}
        self._limit = _MIN_SEEDS

    @property
    def nbytes(self) -> int:
        """Bytes of memory, about."""
        return _NBYTES_PER_SEED * len(self._adapter_of)

    def note(self, namespace: Namespace, seed: int) -> None:
        """An event is in this namespace, whose seed is given."""
        if namespace.lora_name and seed not in self._adapter_of:
            if len(self._adapter_of) >= self._limit:
                self.shrink()
                self._limit = max(_MIN_SEEDS, 2 * len(self._adapter_of))
            self._adapter_of[seed] = namespace.lora_name

    def of(self, lora_name: str) -> U64:
        """uint64[n], the seeds of the adapter without a salt, and with each salt that is known."""
        seeds = {seed for seed, name in self._adapter_of.items() if name == lora_name}
        return np.array(sorted(seeds | {seed_of(Namespace(lora_name))}), dtype=np.uint64)

    def adapter_of(self, seed: int) -> str:
        """The adapter's name; "" for the base model."""
        return self._adapter_of.get(seed, "")

    def shrink(self) -> bool:
        """Forget seeds of which no block is left; False if there were few."""
        table = self._block_store.runs
        live = set(table.column(runs.SEED)[table.is_live].tolist())
        before = len(self._adapter_of)
        self._adapter_of = {seed: a for seed, a in self._adapter_of.items() if seed in live}
        return 2 * len(self._adapter_of) < before

    def items(self) -> dict[str, list[int]]:
        """Seeds by adapter."""
        names = sorted(set(self._adapter_of.values()))
        return {name: [int(seed) for seed in self.of(name)] for name in names}

    def load(self, seeds: Mapping[str, list[int]]) -> None:
        """Be what `items` said."""
        self._adapter_of = {seed: name for name, those in seeds.items() for seed in those}
