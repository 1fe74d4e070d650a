"""Discrete states made of digits: index, active features and one-hot encoding.

Every domain's discrete state is a tuple of digits (row, column, stage; two stocks; four bins).
``sizes`` says how many values each digit takes. The *index* counts tuples in row-major order, last
digit fastest; the *encoding* concatenates one one-hot vector per digit; the *active features* are
the positions of its ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

__all__ = ["active_features", "one_hot_encoding", "ravel_index", "unravel_index"]


def ravel_index(digits: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Row-major index of a tuple of digits.

    Args:
        digits: One integer tensor ``[*batch]`` per digit.
        sizes: Number of values of each digit.

    Returns:
        Index in ``[0, prod(sizes))``, shape ``[*batch]``.

    >>> ravel_index([torch.tensor(4), torch.tensor(0), torch.tensor(2)], (5, 5, 6))
    tensor(122)
    """
    index = digits[0]
    for digit, size in zip(digits[1:], sizes[1:], strict=True):
        index = index * size + digit
    return index


def unravel_index(index: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """Digits of a row-major index: the inverse of :func:`ravel_index`.

    >>> unravel_index(torch.tensor(122), (5, 5, 6))
    (tensor(4), tensor(0), tensor(2))
    """
    digits = []
    for size in reversed(sizes[1:]):
        digits.append(index % size)
        index = index // size
    return (index, *reversed(digits))


def active_features(index: Tensor, sizes: Sequence[int]) -> Tensor:
    """Positions of the ones in the one-hot encoding, shape ``[*batch, digits]``.

    >>> active_features(torch.tensor(122), (5, 5, 6))
    tensor([ 4,  5, 12])
    """
    digits, offsets = unravel_index(index, sizes), list(accumulate(sizes, initial=0))[:-1]
    shifted = [digit + offset for digit, offset in zip(digits, offsets, strict=True)]
    return torch.stack(shifted, -1)


def one_hot_encoding(index: Tensor, sizes: Sequence[int]) -> Tensor:
    """Concatenated one-hot vectors of the digits, float32 ``[*batch, sum(sizes)]``.

    >>> one_hot_encoding(torch.tensor(5), (2, 3))
    tensor([0., 1., 0., 0., 1.])
    """
    features = active_features(index, sizes)
    zeros = torch.zeros(*index.shape, sum(sizes), device=index.device)
    return zeros.scatter(-1, features, 1.0)
