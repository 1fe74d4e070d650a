"""How an action spec lays out its choices, and random choices from it on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torchrl.data import (
    Binary,
    Categorical,
    MultiCategorical,
    MultiOneHot,
    OneHot,
    TensorSpec,
)

from bmc_torchrl.functional import legal_action_at

__all__ = ["ActionLayout"]


class ActionLayout(NamedTuple):
    """One or several discrete variables, as indices or one-hot vectors.

    Args:
        sizes (tuple of int): how many choices each variable has.
        one_hot (bool): whether choices are one-hot vectors, side by side.
        multiple (bool): whether the action has a dimension for its variables.

    Examples:
        >>> ActionLayout.of(MultiCategorical([2, 3]))
        ActionLayout(sizes=(2, 3), one_hot=False, multiple=True)
    """

    sizes: tuple[int, ...]
    one_hot: bool
    multiple: bool

    @classmethod
    def of(cls, spec: TensorSpec) -> ActionLayout:
        """The layout of a discrete spec; other specs are a TypeError.

        Args:
            spec (TensorSpec): of the action itself, no Composite.

        Returns:
            Its layout.
        """
        if isinstance(spec, MultiOneHot):
            return cls(tuple(int(box.n) for box in spec.space), one_hot=True, multiple=True)
        if isinstance(spec, OneHot):
            return cls((int(spec.space.n),), one_hot=True, multiple=False)
        if isinstance(spec, Binary):
            return cls((2,) * int(spec.shape[-1]), one_hot=False, multiple=True)
        if isinstance(spec, MultiCategorical):
            nvec = spec.nvec.reshape(-1, spec.nvec.shape[-1])
            if bool((nvec != nvec[0]).any()):
                raise ValueError(f"Every batch element must have the same choices, got {nvec}.")
            return cls(tuple(nvec[0].tolist()), one_hot=False, multiple=True)
        if isinstance(spec, Categorical):
            return cls((int(spec.n),), one_hot=False, multiple=False)
        raise TypeError(
            "ε-greedy needs a discrete action spec (Categorical, OneHot, MultiCategorical, "
            f"MultiOneHot, Binary), got {type(spec).__name__}."
        )

    def fits(self, action: Tensor) -> bool:
        """Whether a tensor's last dimension is that of an action.

        Args:
            action (Tensor): the tensor.
        """
        if not (self.one_hot or self.multiple):
            return True
        size = sum(self.sizes) if self.one_hot else len(self.sizes)
        return action.ndim > 0 and action.shape[-1] == size

    def choices_shape(self, action: Tensor) -> torch.Size:
        """Shape of what has one entry per choice: masks, action values.

        Args:
            action (Tensor): the action.

        Returns:
            ``[*batch, sum of sizes]``.
        """
        batch = action.shape[:-1] if self.one_hot or self.multiple else action.shape
        return torch.Size((*batch, sum(self.sizes)))

    def index_shape(self, action: Tensor) -> torch.Size:
        """Shape of one uniform draw per variable.

        Args:
            action (Tensor): the action.

        Returns:
            ``[*batch]`` or ``[*batch, variables]``.
        """
        if not self.one_hot:
            return action.shape
        return torch.Size((*action.shape[:-1], *([len(self.sizes)] if self.multiple else [])))

    def from_uniform(self, draws: Tensor, mask: Tensor | None, like: Tensor) -> Tensor:
        """Uniform legal actions.

        Args:
            draws (Tensor): uniform on [0, 1), of :meth:`index_shape`.
            mask (Tensor, optional): ``[*batch, sum of sizes]``, True where legal.
            like (Tensor): the action to replace.

        Returns:
            Actions in the shape and dtype of `like`.
        """
        columns = draws.unbind(-1) if self.multiple else (draws,)
        masks: Sequence[Tensor | None] = [None] * len(self.sizes)
        if mask is not None:
            masks = torch.split(mask, list(self.sizes), -1)
        indices = [
            (column * size).long() if legal is None else legal_action_at(column, legal)
            for column, size, legal in zip(columns, self.sizes, masks, strict=True)
        ]
        return self._encode(indices, like)

    def from_softmax(
        self, logits: Tensor, draws: Tensor, mask: Tensor | None, like: Tensor
    ) -> Tensor:
        """Legal actions drawn from softmax(logits), by the Gumbel-max trick.

        Args:
            logits (Tensor): ``[*batch, size]``.
            draws (Tensor): uniform on [0, 1), of the same shape.
            mask (Tensor, optional): of the same shape, True where legal.
            like (Tensor): the action to replace.

        Returns:
            Actions in the shape and dtype of `like`.
        """
        perturbed = logits - torch.log(-torch.log1p(-draws))
        if mask is not None:
            perturbed = perturbed.masked_fill(~mask, -torch.inf)
        return self._encode([perturbed.argmax(-1)], like)

    def has_legal(self, mask: Tensor, like: Tensor) -> Tensor:
        """Where every variable has a legal choice.

        Args:
            mask (Tensor): ``[*batch, sum of sizes]``, True where legal.
            like (Tensor): the action.

        Returns:
            bool, broadcastable to `like`.
        """
        parts = torch.split(mask, list(self.sizes), -1)
        legal = torch.stack([part.any(-1) for part in parts]).all(0)
        return legal if like.ndim == legal.ndim else legal.unsqueeze(-1)

    def _encode(self, indices: list[Tensor], like: Tensor) -> Tensor:
        if self.one_hot:
            # Not F.one_hot, which reads the indices back to check their range.
            parts = [
                index.unsqueeze(-1) == torch.arange(size, device=index.device)
                for index, size in zip(indices, self.sizes, strict=True)
            ]
            return torch.cat(parts, -1).to(like.dtype)
        return (torch.stack(indices, -1) if self.multiple else indices[0]).to(like.dtype)
