"""Deterministic numbers that any library can make for itself: splitmix64 of an index.

In:  integers.   Out: 64-bit integers, the same everywhere (Steele, Lea, Flood 2014).
"""


def splitmix64(x: int) -> int:
    """The finaliser, over x plus the golden ratio."""
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def prompt(number: int, num_tokens: int) -> list[int]:
    """Token ids of a prompt, below 32000."""
    return [splitmix64((number << 32) + i) % 32_000 for i in range(num_tokens)]
