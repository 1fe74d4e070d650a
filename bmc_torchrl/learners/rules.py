"""Step 2 of the algorithm: how Q learns from a transition, and by how much it changed."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor, nn

from bmc_torchrl.functional import greedy_return, mixture_return
from bmc_torchrl.learners.objectives import tabular_update
from bmc_torchrl.learners.published_fit import adam_state, fit_minibatch
from bmc_torchrl.learners.replay import run_replay_buffer
from bmc_torchrl.learners.values import QTable
from bmc_torchrl.precision import KeepsPrecision

__all__ = ["ACTIVE_KEY", "LearningRule", "PublishedDQN", "TabularSarsa"]

ACTIVE_KEY = ("collector", "mask")
"""Where a transition says whether its run is still learning; strategies skip the others."""


class LearningRule(nn.Module, ABC):
    """How Q learns from one vector step.

    :meth:`learn` writes ``"loss"`` and, where a strategy reads it, ``"value_change"`` ``[runs]``.
    """

    on_policy: bool = False
    """Whether the target needs ε of the next state, ``("next", "epsilon")``."""

    @abstractmethod
    def learn(self, transition: TensorDictBase, episodes: Tensor, value_change: bool) -> None:
        """Learn from `transition` ``[runs]``.

        Args:
            transition: with the returns of :class:`~bmc_torchrl.OneStepReturns`.
            episodes: finished episodes of each run, ``[runs]``.
            value_change: whether to write ``"value_change"``.
        """

    def compile_learning(self, **options: Any) -> None:
        """Compile what is computed, with these options of ``torch.compile``; replay stays as it is.

        (Not ``compile``, which ``nn.Module`` has for its forward.)
        """
        self.learn = torch.compile(self.learn, **options)  # type: ignore[method-assign]


class TabularSarsa(LearningRule):
    r"""Expected SARSA in a table: :math:`Q(s, a) \leftarrow Q(s, a) + \eta (G - Q(s, a))`.

    The learning rate of a run's episode k is ``max(learning_rate * decay**k, floor)``.

    >>> rule = TabularSarsa(QTable(3, 2, runs=4), learning_rate=0.5, decay=0.99, floor=0.01)
    >>> rule.rate(torch.tensor([0, 1000]))
    tensor([0.5000, 0.0100])
    """

    on_policy = True

    def __init__(
        self,
        table: QTable,
        learning_rate: float,
        *,
        decay: float = 1.0,
        floor: float = 0.0,
        state_key: NestedKey = "state",
    ) -> None:
        super().__init__()
        if not 0 < learning_rate <= 1:
            raise ValueError(f"learning_rate must be in (0, 1], got {learning_rate}.")
        self.table, self.state_key = table, state_key
        self.learning_rate, self.decay, self.floor = learning_rate, decay, floor

    def rate(self, episodes: Tensor) -> Tensor:
        """η of each run."""
        decay = torch.full_like(episodes, self.decay, dtype=torch.get_default_dtype())
        return (self.learning_rate * decay**episodes).clamp(min=self.floor)

    def learn(self, transition: TensorDictBase, episodes: Tensor, value_change: bool) -> None:
        """See :class:`LearningRule`."""
        epsilon = transition.get(("next", "epsilon"))
        target = mixture_return(
            transition.get("greedy_return"), transition.get("uniform_return"), epsilon
        )
        rate = self.rate(episodes) * transition.get(ACTIVE_KEY)
        state, action = transition.get(self.state_key), transition.get("action")
        chosen = self.table(state).detach().gather(-1, action.unsqueeze(-1)).squeeze(-1)
        table = self.table.weight.data
        change = tabular_update(table, state, action, target.to(table), rate.to(table))
        transition.set("loss", (target - chosen).square())
        transition.set("value_change", change)


class PublishedDQN(LearningRule):
    r"""The DQN of the published data: no target network, several epochs on one minibatch.

    Every vector step stores the transition and, once the buffer holds a batch, draws one minibatch
    per run without replacement, computes its targets :math:`r + \gamma \max Q(s', \cdot)` once, and
    takes `epochs` Adam steps on it; see :func:`~bmc_torchrl.learners.published_fit.fit_minibatch`.

    Args:
        network: maps `feature_key` to action values, one copy of the weights per run.
        runs: number of runs.
        gamma: discount factor.
        learning_rate: Adam's.
        batch_size: transitions per run and minibatch.
        capacity: transitions of each run that the buffer keeps.
        epochs: Adam steps per minibatch.
        l2: Keras' kernel penalty.
        feature_key: what the network reads and the buffer stores.
        device: where the buffer is.
    """

    def __init__(
        self,
        network: nn.Module,
        *,
        runs: int,
        gamma: float,
        learning_rate: float = 1e-3,
        batch_size: int = 32,
        capacity: int = 2000,
        epochs: int = 1,
        l2: float = 0.0,
        feature_key: NestedKey = "state",
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        if capacity < batch_size:
            raise ValueError(f"capacity={capacity} must hold a batch of batch_size={batch_size}.")
        self.network, self.gamma, self.feature_key = network, gamma, feature_key
        self.batch_size, self.epochs, self.l2 = batch_size, epochs, l2
        self.learning_rate = learning_rate
        self.replay = run_replay_buffer(capacity, runs, batch_size, device=device)
        self.adam = _Moments(dict(network.named_parameters()))

    def get_extra_state(self) -> dict[str, Any]:
        """The replay buffer, so that a checkpoint has it."""
        return {"replay": self.replay.state_dict()}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Fill the replay buffer as it was."""
        self.replay.load_state_dict(state["replay"])

    def learn(self, transition: TensorDictBase, episodes: Tensor, value_change: bool) -> None:
        """See :class:`LearningRule`."""
        kept = transition.select("action", self.feature_key, ("next", self.feature_key))
        kept.set(("next", "reward"), transition.get(("next", "reward")))
        # Not masked where only the step limit ended the episode: docs/protocol.md §4.
        kept.set(("next", "terminated"), transition.get(("next", "terminated")))
        # Without a device, TorchRL keeps the cursor that it reads on the host.
        self.replay.extend(kept.unsqueeze(-1).clear_device_())
        action = transition.get("action").unsqueeze(-1)
        features = transition.get(self.feature_key)
        loss = torch.zeros(transition.batch_size, device=action.device)
        ready = len(self.replay) >= self.batch_size * transition.numel()
        if ready:
            loss = self._fit(self.replay.sample())
        transition.set("loss", loss)
        if value_change:
            before = transition.get("action_value").gather(-1, action).squeeze(-1)
            after = before
            if ready:
                with torch.no_grad():
                    after = self.network(features).gather(-1, action).squeeze(-1)
            transition.set("value_change", after - before)

    def compile_learning(self, **options: Any) -> None:
        """See :class:`LearningRule`."""
        self._fit = torch.compile(self._fit, **options)  # type: ignore[method-assign]

    def _fit(self, batch: TensorDictBase) -> Tensor:
        following = batch.get("next")
        with torch.no_grad():
            value = self.network(following.get(self.feature_key))
            target = greedy_return(
                following.get("reward").squeeze(-1),
                value,
                self.gamma,
                terminated=following.get("terminated").squeeze(-1),
            ).to(value.dtype)
        parameters = {name: p.detach() for name, p in self.network.named_parameters()}
        return fit_minibatch(
            functools.partial(torch.func.functional_call, self.network),
            parameters,
            self.adam.state(),
            batch.get(self.feature_key),
            batch.get("action"),
            target,
            epochs=self.epochs,
            learning_rate=self.learning_rate,
            l2=self.l2,
        )


class _Moments(KeepsPrecision):
    """Adam's moments as buffers, so that they follow the module."""

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        super().__init__()
        for name, moments in adam_state(parameters).items():
            for kind, value in moments.items():
                self.register_buffer(f"{name}:{kind}".replace(".", "/"), value)

    def state(self) -> dict[str, dict[str, Tensor]]:
        result: dict[str, dict[str, Tensor]] = {}
        for key, value in self.named_buffers():
            name, kind = key.replace("/", ".").split(":")
            result.setdefault(name, {})[kind] = value
        return result

    def keeps(self, name: str, buffer: Tensor) -> bool:
        """Whether it counts steps, in float64; moments have the precision of the weights."""
        return buffer.dtype == torch.float64
