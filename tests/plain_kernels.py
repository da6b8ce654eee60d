"""The environment of a child process whose subject is not the compiled kernels.

To load them is half of what a short-lived process costs; as plain Python they answer the same
(`make test-kernels`).
"""

import os


def with_plain_kernels(**more):
    return {**os.environ, "NUMBA_DISABLE_JIT": "1", **more}
