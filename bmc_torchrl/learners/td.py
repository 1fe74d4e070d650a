"""One-step temporal differences of a Q-network as pure functions of tensors."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from bmc_torchrl.functional import greedy_value, mixture_return, uniform_value

__all__ = ["LossFunction", "next_value", "td_loss"]

LossFunction = Literal["l2", "smooth_l1"]


def next_value(
    value: Tensor,
    *,
    online: Tensor | None = None,
    epsilon: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    r"""The value of a state under the target's policy, ``[*batch]``.

    :math:`\max_a Q(s, a)`; with `online`, Double DQN's :math:`Q(s, \arg\max_a Q_{online}(s, a))`;
    with `epsilon`, expected SARSA's :math:`(1-\varepsilon)\max + \varepsilon\,\mathrm{mean}`.

    Args:
        value (Tensor): Action values of the state, ``[*batch, actions]``.
        online (Tensor or None): Action values that choose the action.
        epsilon (Tensor or None): ε of the policy in the state, ``[*batch]``.
        mask (Tensor or None): Legal actions, ``[*batch, actions]``.

    Examples:
        >>> value = torch.tensor([[1.0, 3.0]])
        >>> next_value(value), next_value(value, epsilon=torch.tensor([0.5]))
        (tensor([3.]), tensor([2.5000]))
    """
    if online is not None:
        legal = online if mask is None else online.masked_fill(~mask, -torch.inf)
        return value.gather(-1, legal.argmax(-1, keepdim=True)).squeeze(-1)
    greedy = greedy_value(value, mask)
    return (
        greedy if epsilon is None else mixture_return(greedy, uniform_value(value, mask), epsilon)
    )


def td_loss(
    chosen: Tensor, target: Tensor, function: LossFunction = "l2", reduction: str = "none"
) -> Tensor:
    """The loss of each transition, ``[*batch]``, as TorchRL's ``distance_loss`` has it."""
    if function == "l2":
        return F.mse_loss(chosen, target, reduction=reduction)
    return F.smooth_l1_loss(chosen, target, reduction=reduction)
