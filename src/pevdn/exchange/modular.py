"""Arithmetic modulo p ≤ 2³² on uint32 arrays of JAX or NumPy, and additive shares made of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

FULL = 2**32
Words = Any  # an array of uint32 below p


def add(a: Words, b: Words, modulus: int) -> Words:
    """Return (a + b) mod p for a, b < p ≤ 2³², without a wider integer."""
    total = a + b  # wraps modulo 2³²
    if modulus == FULL:
        return total
    xp = total.__array_namespace__()
    p = xp.asarray(modulus, dtype=xp.uint32)
    return xp.where((total < a) | (total >= p), total - p, total)


def negate(a: Words, modulus: int) -> Words:
    """Return −a mod p."""
    xp = a.__array_namespace__()
    if modulus == FULL:
        return xp.zeros_like(a) - a
    return xp.where(a == 0, a, xp.asarray(modulus, dtype=xp.uint32) - a)


def total(vectors: Iterable[Words], modulus: int) -> Words:
    """Return the sum of vectors (n, ...) modulo p; (...)."""
    first, *others = vectors
    for vector in others:
        first = add(first, vector, modulus)
    return first


def shares(secret: Words, uniform: Words, modulus: int) -> Words:
    """Split a secret (...) into n shares (n, ...), given n − 1 uniform ones (n − 1, ...).

    Any n − 1 of the shares are uniform on Z_p and independent of the secret, towards an observer
    who knows nothing else of the uniform ones. Their sum is the secret.
    """
    xp = secret.__array_namespace__()
    rest = secret
    for share in uniform:
        rest = add(rest, negate(share, modulus), modulus)
    return xp.concatenate([*(share[None] for share in uniform), rest[None]])
