"""Gumbel noise as a pure function of (seed, draw, tensor, element).

A counter-based generator needs no state: the backward pass makes the same noise again instead of keeping it,
a resumed run draws what an uninterrupted one would have drawn, and an element's noise does not depend on how
the tensor is cut up. Each element's index goes through a 32-bit integer mixer, keyed twice so that two draws
are not the same values in another order.
"""

from typing import Final
from zlib import crc32

import torch
from torch import Tensor

_MASK64: Final = (1 << 64) - 1
# Odd multipliers of a well-mixing 32-bit finaliser, written as the signed integers that torch's int32 holds.
MIX_A: Final = 0x7FEB352D
MIX_B: Final = 0x846CA68B - (1 << 32)


def noise_key(seed: int, draw: int, name: str) -> tuple[int, int]:
    """Fold the coordinates of a draw into two 32-bit keys.

    Args:
        seed: Of the run.
        draw: Its number in the run.
        name: The tensor's; its noise stays the same when others are left out.

    Returns:
        Two integers in the range of int32.
    """
    key = _splitmix(_splitmix(_splitmix(seed & _MASK64) ^ (draw & _MASK64)) ^ crc32(name.encode()))
    return signed(key >> 32), signed(key)


def signed(x: int) -> int:
    """The int32 with the last 32 bits of an integer."""
    return (x + (1 << 31)) % (1 << 32) - (1 << 31)


def uniform(index: Tensor, key: tuple[int, int]) -> Tensor:
    """Uniform numbers in (0, 1), neither end ever reached.

    Args:
        index: int32, any shape: the element's position in the tensor.
        key: From `noise_key`.

    Returns:
        fp32 of the same shape: odd multiples of 2^-24.
    """
    bits = _mix(index, key)
    # 23 bits and a half: with 24, the largest would round to 1 in fp32.
    return bits.bitwise_and_(0x7FFFFF).to(torch.float32).add_(0.5).mul_(2.0**-23)


def gumbel(index: Tensor, key: tuple[int, int]) -> Tensor:
    """Standard Gumbel noise, -log(-log(u)), of the elements at `index` (int32, any shape); fp32."""
    return uniform(index, key).log_().neg_().log_().neg_()


def _mix(index: Tensor, key: tuple[int, int]) -> Tensor:
    x = index.add(key[0])
    x.bitwise_xor_(_shift(x, 16)).mul_(MIX_A)
    x.bitwise_xor_(_shift(x, 15)).add_(key[1]).mul_(MIX_B)
    return x.bitwise_xor_(_shift(x, 16)).bitwise_right_shift_(9)


def _shift(x: Tensor, bits: int) -> Tensor:
    # int32 shifts carry the sign in; the mask makes the shift a logical one.
    return (x >> bits) & ((1 << (32 - bits)) - 1)


def _splitmix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)
