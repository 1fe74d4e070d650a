"""The hook by which TorchRL's own trainers update ε."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torchrl.trainers import Trainer, TrainerHookBase

from bmc_torchrl.exploration import AdaptiveEGreedyModule, OneStepReturns

__all__ = ["UpdateEpsilon"]


class UpdateEpsilon(TrainerHookBase):  # type: ignore[misc]
    """Lets the ``greedy_module`` of a TorchRL trainer learn from every batch it collects.

    The batch gets the returns, so that ``LogScalar`` can show them beside ``"epsilon"``.

    Args:
        gamma: discount factor.
        q_actor: what writes the action values, the loss module's value network by default.
        **keys: as in :class:`~bmc_torchrl.OneStepReturns`.

    >>> hook = UpdateEpsilon(gamma=0.99)
    >>> # trainer = DQNTrainer(..., greedy_module=explore); hook.register(trainer)
    """

    def __init__(
        self, gamma: float, q_actor: TensorDictModuleBase | None = None, **keys: Any
    ) -> None:
        self.gamma, self.q_actor, self.keys = gamma, q_actor, keys

    def register(self, trainer: Trainer, name: str = "update_epsilon") -> None:
        """Update on every collected batch, before the replay buffer gets it."""
        explore = getattr(trainer, "greedy_module", None)
        if not isinstance(explore, AdaptiveEGreedyModule):
            raise TypeError(
                "UpdateEpsilon needs a trainer built with greedy_module=AdaptiveEGreedyModule(...),"
                f" got greedy_module={explore!r}."
            )
        loss = trainer.loss_module
        q_actor = self.q_actor or getattr(loss, "value_network", None) or loss.local_value_network
        self.explore, self.returns = explore, OneStepReturns(q_actor, self.gamma, **self.keys)
        trainer.register_op("batch_process", self)
        trainer.register_module(name, self)

    def __call__(self, batch: TensorDictBase) -> TensorDictBase:
        """ε after the batch."""
        self.explore.update(self.returns(batch))
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The posterior, so that the trainer's checkpoints have it."""
        return {"explore": self.explore.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The posterior as it was."""
        self.explore.load_state_dict(state_dict["explore"])
