"""How kernels are compiled: read-only inputs, wrong dtypes, and no place for a cache."""

import gc
import os
import subprocess
import sys

import numpy as np
import pytest

from kvplug.kernels import table
from kvplug.kernels._jit import fold_multiply, i8, inlined, inlined_optimized, kernel

COMPILED = not os.environ.get("NUMBA_DISABLE_JIT")


def test_read_only_inputs_are_taken():
    slots, keys = np.zeros(32, dtype=np.uint64), np.frombuffer(b"\1" * 16, dtype=np.uint64)
    out = np.empty(2, dtype=np.uint64)
    table.find_many(slots, keys, out)
    assert out.tolist() == [0, 0]


@pytest.mark.skipif(not COMPILED, reason="plain Python takes any array")
def test_a_wrong_dtype_is_rejected():
    slots, out = np.zeros(32, dtype=np.uint64), np.empty(1, dtype=np.uint64)
    with pytest.raises(TypeError):
        table.find_many(slots, np.zeros(1, dtype=np.int64), out)


@pytest.mark.slow
@pytest.mark.skipif(not COMPILED, reason="nothing is cached")
def test_without_a_cache_directory_kernels_compile_in_memory():
    # What Numba sees in a read-only container without a home: no place that it may write to.
    program = (
        "from numba.core.caching import CacheImpl; CacheImpl._locator_classes = [];"
        "import numpy as np; from kvplug.kernels import table;"
        "print(table.erase_many(np.zeros(20, np.uint64), np.ones(1, np.uint64)))"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (run.returncode, run.stdout.strip()) == (0, "0"), run.stderr


@pytest.mark.skipif(not COMPILED, reason="there is only the reference implementation")
def test_the_wide_multiplication_equals_its_reference():
    import numba

    compiled = numba.njit(lambda a, b: fold_multiply(a, b))
    for a, b in [(0, 0), (2**64 - 1, 2**64 - 1), (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F)]:
        product = a * b
        expected = (product ^ (product >> 64)) & (2**64 - 1)
        assert int(compiled(np.uint64(a), np.uint64(b))) == expected


@pytest.mark.skipif(not COMPILED, reason="parts are functions")
def test_a_part_is_not_called_from_python():
    slots = np.zeros(10, dtype=np.uint64)
    table.find_many(slots, slots[:1], slots[1:2])
    with pytest.raises(TypeError, match="capacity_of is a part of kernels"):
        table.capacity_of(slots)


@inlined
def _quotient(a, b):
    return a // b


@inlined_optimized
def _quotient_of_parts(a, b):
    return _quotient(a, b)


@kernel(i8(i8, i8))
def quotients(a, b):
    """Through a part, and through a part of a part."""
    return _quotient(a, b) + _quotient_of_parts(a, b)


def test_what_a_part_raises_reaches_python():
    assert quotients(7, 2) == 6
    with pytest.raises(ZeroDivisionError):
        quotients(7, 0)


def test_garbage_is_collected_after_a_kernel_is_compiled():
    quotients(1, 1)
    assert gc.isenabled()
