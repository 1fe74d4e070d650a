"""Expected SARSA as a TorchRL loss module, and the tabular update that it amounts to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import dispatch
from tensordict.utils import NestedKey, unravel_key
from torch import Tensor, nn
from torchrl.envs.utils import step_mdp
from torchrl.objectives import DQNLoss
from torchrl.objectives.utils import distance_loss

from bmc_torchrl.functional import greedy_return, mixture_return, uniform_return

__all__ = ["ExpectedSarsaLoss", "tabular_update"]


class ExpectedSarsaLoss(DQNLoss):  # type: ignore[misc]
    r"""Expected SARSA: `DQNLoss` whose next action is ε-greedy instead of greedy.

    The target is :math:`r' + \gamma [(1 - \varepsilon) \max_{a'} Q(s', a') + \varepsilon\,
    \mathrm{mean}_{a'} Q(s', a')]` ([GSL19], Eq. (3)); with ε = 0 the loss is `DQNLoss`.

    ε is read from the transition, else from the loss: ``("next", "epsilon")``, the ε of the next
    state, or ``"epsilon"``, the ε that chose the action, or the buffer `epsilon`. Its shape is that
    of the batch or of its leading dimensions (one ε per run). Where the value network reads an
    action mask, maximum and mean are over the legal actions of the next state.

    Args:
        value_network: the greedy actor, without the exploration module.
        epsilon: ε where the transitions carry none; assign ``loss.epsilon = 0.1`` to change it.
        loss_function: ``"l2"``, ``"l1"`` or ``"smooth_l1"``.
        delay_value: whether the target uses separate, delayed parameters.
        mask_terminated: whether the bootstrap is zero after termination. The published
            experiments bootstrap from the terminal state too.
        action_space: of the actor, unless it knows.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        use_prioritized_weights: as in `DQNLoss`.

    Examples:
        >>> from bmc_torchrl.learners.values import QTable, q_actor
        >>> actor = q_actor(QTable(num_states=2, num_actions=2, runs=3), num_actions=2)
        >>> loss = ExpectedSarsaLoss(actor, epsilon=0.1, reduction="none")
        >>> loss.make_value_estimator(gamma=0.9)
        >>> zeros = torch.zeros(3, dtype=torch.int64)
        >>> done = torch.zeros(3, 1, dtype=torch.bool)
        >>> following = {"state": zeros, "reward": torch.ones(3, 1), "done": done}
        >>> following["terminated"] = done
        >>> transition = {"state": zeros, "action": zeros, "next": following}
        >>> loss(TensorDict(transition, [3]))["loss"]
        tensor([1., 1., 1.], grad_fn=<MseLossBackward0>)
    """

    @dataclass
    class _AcceptedKeys(DQNLoss._AcceptedKeys):  # type: ignore[misc]
        """The keys of `DQNLoss`, ε, and the mask of legal actions."""

        epsilon: NestedKey = "epsilon"
        action_mask: NestedKey = "action_mask"

    default_keys = _AcceptedKeys
    _schedulable_buffers = frozenset({"epsilon"})

    def __init__(
        self,
        value_network: nn.Module,
        *,
        epsilon: float | Tensor | None = None,
        loss_function: str = "l2",
        delay_value: bool = False,
        mask_terminated: bool = True,
        action_space: Any = None,
        reduction: str | None = None,
        use_prioritized_weights: str | bool = "auto",
    ) -> None:
        super().__init__(
            value_network,
            loss_function=loss_function,
            delay_value=delay_value,
            action_space=action_space,
            reduction=reduction,
            use_prioritized_weights=use_prioritized_weights,
        )
        self.mask_terminated = mask_terminated
        keys = (getattr(module, "action_mask_key", None) for module in value_network.modules())
        self.set_keys(action_mask=next((key for key in keys if key is not None), None))
        device = next((p.device for p in value_network.parameters()), None)
        if epsilon is not None:
            epsilon = torch.as_tensor(epsilon, dtype=torch.get_default_dtype(), device=device)
        self.register_buffer("epsilon", epsilon)

    def _set_in_keys(self) -> None:
        super()._set_in_keys()
        self._in_keys += [unravel_key(("next", self.tensor_keys.epsilon)), self.tensor_keys.epsilon]

    def _epsilon(self, tensordict: TensorDictBase) -> Tensor:
        key = self.tensor_keys.epsilon
        epsilon: Tensor | None = tensordict.get(unravel_key(("next", key)), None)
        if epsilon is None:
            epsilon = tensordict.get(key, self.epsilon)
        if epsilon is None:
            raise KeyError(
                f"ε is neither in the transitions (keys ('next', {key!r}) and {key!r}) nor in the "
                "loss: pass epsilon=… to the loss, or set_keys(epsilon=…)."
            )
        return epsilon

    def _next_value(
        self, tensordict: TensorDictBase, next_action_value: Tensor, terminated: Tensor | None
    ) -> Tensor:
        """The value ``[*batch]`` of the next state, zero where `terminated`."""
        mask: Tensor | None = None
        if self.tensor_keys.action_mask in self.value_network.in_keys:
            mask = tensordict.get(unravel_key(("next", self.tensor_keys.action_mask)))
        greedy, uniform = (
            one_step_return(
                torch.zeros_like(next_action_value[..., 0]),
                next_action_value,
                gamma=1.0,
                terminated=terminated,
                action_mask=mask,
            )
            for one_step_return in (greedy_return, uniform_return)
        )
        epsilon = _align_right(self._epsilon(tensordict), greedy)
        return mixture_return(greedy, uniform, epsilon)

    def _chosen_value(self, tensordict: TensorDictBase) -> Tensor:
        data = tensordict.clone(False)
        with self.value_network_params.to_module(self.value_network, preserve_module_state=False):
            self.value_network(data)
        action_value = data.get(self.tensor_keys.action_value)
        action = self._action_index(tensordict.get(self.tensor_keys.action), action_value)
        chosen: Tensor = action_value.gather(-1, action.unsqueeze(-1)).squeeze(-1)
        return chosen

    def _action_index(self, action: Tensor, action_value: Tensor) -> Tensor:
        if self.action_space != "categorical":
            return action.to(torch.uint8).argmax(-1)
        return action.squeeze(-1) if action.ndim == action_value.ndim else action

    def _target(self, tensordict: TensorDictBase) -> Tensor:
        data = tensordict.clone(False)
        key = unravel_key(("next", self.tensor_keys.terminated))
        done = data.get(unravel_key(("next", self.tensor_keys.done)))
        terminated = data.get(key, done)
        if not self.mask_terminated:
            data.set(key, torch.zeros_like(terminated))
        step = step_mdp(data, keep_other=False)
        parameters = self.target_value_network_params
        with torch.no_grad(), parameters.to_module(self.value_network, preserve_module_state=False):
            self.value_network(step)
        next_value = self._next_value(
            tensordict,
            step.get(self.tensor_keys.action_value),
            terminated.squeeze(-1) if self.mask_terminated else None,
        )
        estimator = self.value_estimator
        target: Tensor = estimator.value_estimate(data, next_value=next_value.unsqueeze(-1))
        return target.squeeze(-1)

    @dispatch  # type: ignore[untyped-decorator]
    def forward(self, tensordict: TensorDictBase) -> TensorDict:
        """The loss; the squared error is also written to `tensordict`, for prioritised replay.

        Args:
            tensordict: transitions ``[*batch]`` with the action, the inputs of the value network at
                both states, and ``("next", "reward" | "done" | "terminated")``.

        Returns:
            A tensordict with ``"loss"``: a scalar, or ``[*batch]`` with ``reduction="none"``.
        """
        chosen = self._chosen_value(tensordict)
        target = self._target(tensordict)
        error = (chosen.detach() - target).square().unsqueeze(-1)
        tensordict.set(self.tensor_keys.priority, error, inplace=True)
        loss = distance_loss(chosen, target, self.loss_function)
        weights = None
        if self.use_prioritized_weights in (True, "auto"):
            weights = tensordict.get(self.tensor_keys.priority_weight, None)
        result = TensorDict(loss=self._reduce_loss(loss, tensordict=tensordict, weights=weights))
        self._clear_weakrefs(
            tensordict, result, "value_network_params", "target_value_network_params"
        )
        return result


def _align_right(epsilon: Tensor, value: Tensor) -> Tensor:
    """`epsilon` ``[*leading]`` or ``[*batch, 1]``, viewed to broadcast with ``[*batch]``."""
    epsilon = epsilon.to(value.dtype)
    if epsilon.ndim > value.ndim:
        return epsilon.squeeze(-1)
    return epsilon.reshape(epsilon.shape + (1,) * (value.ndim - epsilon.ndim))


@torch.no_grad()
def tabular_update(
    table: Tensor, state: Tensor, action: Tensor, target: Tensor, learning_rate: float | Tensor
) -> Tensor:
    r"""Move one entry of each run's table to its target: :math:`Q \leftarrow Q + \eta (G - Q)`.

    Args:
        table: ``[*runs, states, actions]``, contiguous, changed in place.
        state: int64 ``[*runs]``.
        action: int64 ``[*runs]``.
        target: ``[*runs]``.
        learning_rate: η, a number or ``[*runs]``.

    Returns:
        The value change ``[*runs]``: the entry after minus before.

    Examples:
        >>> table = torch.zeros(2, 3, 2)
        >>> one = torch.ones(2, dtype=torch.int64)
        >>> tabular_update(table, one, one, torch.tensor([1.0, 2.0]), 0.5)
        tensor([0.5000, 1.0000])
        >>> table[:, 1, 1]
        tensor([0.5000, 1.0000])
    """
    states, actions = table.shape[-2:]
    entries = table.view(-1, states * actions)
    entry = (state * actions + action).reshape(-1, 1)
    before = entries.gather(-1, entry).reshape(state.shape)
    after = before + learning_rate * (target - before)
    entries.scatter_(-1, entry, after.reshape(-1, 1))
    return after - before
