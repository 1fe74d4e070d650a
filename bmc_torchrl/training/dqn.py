"""DQN as a Lightning module, exploring with an ε that adapts; with a table, expected SARSA."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import gymnasium
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities.model_helpers import is_overridden
from tensordict import NestedKey
from tensordict.nn import TensorDictSequential
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchrl.collectors import BaseCollector
from torchrl.data import Categorical, ReplayBuffer
from torchrl.envs import EnvBase
from torchrl.modules import QValueActor
from torchrl.objectives import LossModule

from bmc_torchrl.actions import Replacement, as_replacement
from bmc_torchrl.exploration import AdaptiveEGreedyModule, OneStepReturns
from bmc_torchrl.functional import categorical_mean
from bmc_torchrl.learners.builders import mask_key
from bmc_torchrl.learners.q_learning import (
    Learning,
    QLearning,
    Target,
    TorchRLLearning,
    torchrl_learning,
)
from bmc_torchrl.learners.ranks import from_all_ranks, of_this_rank, world_size
from bmc_torchrl.learners.ring import Priorities
from bmc_torchrl.learners.td import LossFunction
from bmc_torchrl.learners.values import q_actor
from bmc_torchrl.strategies import BMCEpsilon, EpsilonStrategy, StrategyBank
from bmc_torchrl.training.compiled_steps import CompiledSteps
from bmc_torchrl.training.episodes import EpisodeLog
from bmc_torchrl.training.greedy_tests import greedy_tests
from bmc_torchrl.training.interaction import EnvSource, as_env, interaction_with
from bmc_torchrl.training.online import OnlineLearning
from bmc_torchrl.training.optimizers import CountedOptimizer, clip_each_run
from bmc_torchrl.training.run_records import RecordedLearner

__all__ = ["EpsilonGreedyDQN"]


class EpsilonGreedyDQN(RecordedLearner):
    r"""DQN whose ε is decided by a strategy, one environment step and one update at a time.

    Every update: act with the current ε, step the environment, compute the two models' returns with
    Q before learning, learn from a minibatch, then let the strategy learn from the transition.
    Lightning does what it documents: ``global_step`` counts optimiser steps, ``max_steps``,
    ``max_time``, precision, gradient clipping, schedulers, checkpoints and early stopping work as
    with any module; ``validate`` plays greedy episodes. A checkpoint resumes to the bit.

    With a :class:`~bmc_torchrl.learners.values.QTable`, ``loss="expected_sarsa"``,
    ``buffer_size=None`` and SGD this is tabular expected SARSA, the one-hot linear special case.

    Args:
        env (EnvBase, gymnasium.Env or callable): Where to learn, or a function that makes it. A
            TorchRL environment has categorical or one-hot actions and batch size ``[]`` or
            ``[runs]``.
        q_network (nn.Module or QValueActor): Observations ``[batch, …]`` to action values
            ``[batch, actions]``; with `runs`, one copy of the weights per run, such as
            :class:`~bmc_torchrl.learners.values.QNetwork`.
        strategy (EpsilonStrategy): The source of ε, ε-BMC by default.
        explore (str or Replacement): What replaces an action: ``"uniform"``, ``"softmax"``,
            ``"zeta"``, or an object such as :class:`~bmc_torchrl.actions.RepeatedAction`. Returns
            and targets stay those of the greedy and the uniform policy.
        gamma (float): Discount factor.
        lr (float): Adam's learning rate, where `optimizer` is not given.
        loss (str, LossModule or callable): ``"dqn"``, ``"double_dqn"`` or ``"expected_sarsa"`` on
            plain tensors; or a TorchRL loss module, or a function that builds one over the actor.
        loss_function (str): ``"smooth_l1"`` or ``"l2"``, on plain tensors.
        batch_size (int): Transitions per update, per run.
        buffer_size (int or None): Transitions in replay, per run; None learns from the last one.
        learning_starts (int or None): Transitions before the first update, a batch by default.
        frames_per_update (int): Environment steps per update.
        n_steps (int): Steps of the return.
        prioritized (bool or Priorities): Prioritised replay.
        target_tau (float or None): Share by which the target network follows; None for no target
            network, 1 with `target_interval` for copies.
        target_interval (int): Updates between two moves of the target network.
        mask_terminated (bool): No bootstrap from terminal states.
        replay_buffer (ReplayBuffer or None): TorchRL's, used with TorchRL's loss.
        target_updater (callable or None): Builds TorchRL's updater over the loss module.
        collector (callable or None): Builds a TorchRL collector over the policy; its batches are
            learned from with `updates_per_batch` updates.
        updates_per_batch (int): Updates per collected batch.
        optimizer (callable or None): Builds the optimiser over the parameters.
        scheduler (callable or None): Builds a learning-rate scheduler, stepped after every update.
        runs (int or None): Independent runs side by side; None is one, without a run dimension.
        episodes (int or None): Training episodes of each run, after which training stops.
        test_every (int): Episodes between two tests by the callbacks that test.
        eval_env (EnvBase, gymnasium.Env or callable): Where to validate; another `env` by default.
        eval_episodes (int): Greedy episodes of a validation, per run.
        max_episode_steps (int): Where a greedy episode is cut.
        observation_key (NestedKey or None): What the network reads of a TorchRL environment.
        epoch_steps (int): Updates that Lightning calls an epoch.
        shared_posterior (bool): With several ranks, let each strategy learn from all ranks' data.
        chunk_steps (int): Updates per Lightning batch. With more than one, optimisation is manual:
            Lightning's own cost is paid once per chunk, `max_grad_norm` takes the place of the
            trainer's clipping, and there is one device.
        max_grad_norm (float or None): Gradient clipping then, each run by itself.
        compile (bool): Compile the updates of a chunk, of 100 by default: several times faster on a
            CPU, after some seconds.

    Examples:
        >>> import gymnasium
        >>> import lightning as L
        >>> network = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
        >>> module = EpsilonGreedyDQN(lambda: gymnasium.make("CartPole-v1"), network, BMCEpsilon())
        >>> trainer = L.Trainer(max_steps=10, logger=False, enable_checkpointing=False,
        ...                     enable_progress_bar=False, enable_model_summary=False)
        >>> trainer.fit(module)
        >>> trainer.global_step
        10
    """

    network: nn.Module
    explore: AdaptiveEGreedyModule
    policy: TensorDictSequential
    returns: OneStepReturns
    learned: tuple[Any, Tensor | None]
    learned_parameters: list[nn.Parameter]

    def __init__(
        self,
        env: EnvSource,
        q_network: nn.Module,
        strategy: EpsilonStrategy | None = None,
        *,
        explore: str | Replacement = "uniform",
        gamma: float = 0.99,
        lr: float = 1e-3,
        loss: Target | LossModule | Callable[[QValueActor], LossModule] = "dqn",
        loss_function: LossFunction = "smooth_l1",
        batch_size: int = 64,
        buffer_size: int | None = 10_000,
        learning_starts: int | None = None,
        frames_per_update: int = 1,
        n_steps: int = 1,
        prioritized: bool | Priorities = False,
        target_tau: float | None = 0.01,
        target_interval: int = 1,
        mask_terminated: bool = True,
        replay_buffer: ReplayBuffer | None = None,
        target_updater: Callable[[LossModule], Any] | None = None,
        collector: Callable[[nn.Module], BaseCollector] | None = None,
        updates_per_batch: int = 1,
        optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None = None,
        scheduler: Callable[[Optimizer], LRScheduler] | None = None,
        runs: int | None = None,
        episodes: int | None = None,
        test_every: int = 1,
        eval_env: EnvSource | None = None,
        eval_episodes: int = 10,
        max_episode_steps: int = 10_000,
        observation_key: NestedKey | None = None,
        epoch_steps: int = 1000,
        shared_posterior: bool = False,
        chunk_steps: int = 1,
        max_grad_norm: float | None = None,
        compile: bool = False,
    ) -> None:
        super().__init__()
        for name, value in (
            ("batch_size", batch_size),
            ("frames_per_update", frames_per_update),
            ("updates_per_batch", updates_per_batch),
            ("eval_episodes", eval_episodes),
            ("epoch_steps", epoch_steps),
            ("chunk_steps", chunk_steps),
        ):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        if not 0 <= gamma <= 1:
            raise ValueError(f"gamma must be between 0 and 1, got {gamma}.")
        self.save_hyperparameters("gamma", "lr", "batch_size", "buffer_size", "n_steps")
        chunk_steps = 100 if compile and chunk_steps == 1 else chunk_steps
        self.automatic_optimization = chunk_steps == 1
        self.gamma, self.lr, self.runs = gamma, lr, runs
        self.env_source, self.eval_source = env, eval_env
        self.eval_episodes, self.max_episode_steps = eval_episodes, max_episode_steps
        self.epoch_steps, self.chunk_steps = epoch_steps, chunk_steps
        self.max_grad_norm, self.updates_per_batch = max_grad_norm, updates_per_batch
        self.make_optimizer, self.make_scheduler = optimizer, scheduler
        self.strategy = self._checked(BMCEpsilon() if strategy is None else strategy)
        self.replacement = as_replacement(explore)
        self.env = as_env(env, () if runs is None else (runs,), "cpu")
        self._make_policy(_actor(self.env, q_network, observation_key))
        if buffer_size is None:
            batch_size = buffer_size = 1
        if isinstance(loss, str) and replay_buffer is None and collector is None:
            priorities = Priorities() if prioritized is True else prioritized or None
            self.learning: Learning = QLearning(
                self.network, gamma, runs=runs, target=cast(Target, loss),
                loss_function=loss_function, batch_size=batch_size, capacity=buffer_size,
                n_steps=n_steps,
                priorities=priorities, target_tau=target_tau, target_interval=target_interval,
                mask_terminated=mask_terminated,
            )  # fmt: skip
        else:
            self.learning = torchrl_learning(
                self.q_actor, gamma, runs=runs, loss=loss, replay_buffer=replay_buffer,
                target_updater=target_updater, batch_size=batch_size, capacity=buffer_size,
                target_tau=target_tau,
            )  # fmt: skip
        self.log_of_episodes = EpisodeLog(
            runs or 1, episodes, test_every, tuple(self.strategy.diagnostics())
        )
        self.online = OnlineLearning(
            self.network,
            self.strategy,
            self.learning,
            interaction_with(self.env, self.q_actor.in_keys[0], self.strategy.state_key),
            self.log_of_episodes,
            num_actions=_num_actions(self.env),
            replacement=self.replacement,
            gamma=gamma,
            mask_terminated=mask_terminated,
            on_policy=loss == "expected_sarsa",
            learning_starts=batch_size if learning_starts is None else learning_starts,
            frames_per_update=frames_per_update,
            shared_posterior=shared_posterior,
        )
        self.compiled: CompiledSteps | None = None
        if compile:
            scheduled = scheduler is not None
            self.compiled = CompiledSteps(self.online, runs, max_grad_norm, scheduled)
        self.step_hooks = self.online.step_hooks
        self.collector_factory = collector
        self.collector: Iterator[Any] | None = None
        self._updates_left = 0
        self._validation_env: EnvBase | None = None
        # Posteriors are each rank's own; targets and logs follow from what is synchronised.
        self._ddp_params_and_buffers_to_ignore = [name for name, _ in self.named_buffers()]

    def _make_policy(self, q_actor: QValueActor) -> None:
        """TorchRL's view of the network and the strategy, which are registered once, elsewhere."""
        explore = AdaptiveEGreedyModule(
            Categorical(_num_actions(self.env)),
            self.strategy,
            action_mask_key=mask_key(self.env),
            explore=self.replacement,
        )
        self.__dict__ |= {
            "q_actor": q_actor,
            "explore": explore,
            "policy": TensorDictSequential(q_actor, explore),
            "network": _values_of(q_actor),
        }

    def __setattr__(self, name: str, value: Any) -> None:
        """Lightning notes the hook it calls, twenty times a step: that need not be registered."""
        if name == "_current_fx_name":
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)

    def _checked(self, strategy: EpsilonStrategy) -> EpsilonStrategy:
        shape = tuple(strategy.batch_shape)
        if shape not in ((), (self.runs or 1,)):
            known = "there is one run" if self.runs is None else f"there are runs={self.runs}"
            raise ValueError(
                f"strategy has batch_shape={list(shape)}, but {known}: build it with "
                f"batch_shape=[{self.runs or 1}], or with batch_shape=() to share one ε."
            )
        return strategy

    def watch(self, bank: StrategyBank) -> None:
        """See :class:`~bmc_torchrl.training.run_records.RecordedLearner`."""
        super().watch(bank)
        self.online.watch(bank)

    def configure_optimizers(self) -> Any:
        """The optimiser over the network, and its scheduler."""
        parameters = [p for p in self.learning.parameters() if p.requires_grad]
        self.__dict__["learned_parameters"] = parameters
        if self.make_optimizer is None:
            fused = self.compiled is None
            optimizer: Optimizer = torch.optim.Adam(parameters, lr=self.lr, fused=fused)
        else:
            optimizer = self.make_optimizer(parameters)
        if self.make_scheduler is None:
            return optimizer
        scheduler = {"scheduler": self.make_scheduler(optimizer), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    def train_dataloader(self) -> _Updates:
        """The updates of an epoch, each after its own interaction."""
        return _Updates(self)

    def val_dataloader(self) -> Sequence[int]:
        """One batch: all greedy episodes."""
        return [0]

    def test_dataloader(self) -> Sequence[int]:
        """One batch: all greedy episodes."""
        return [0]

    def transfer_batch_to_device(
        self, batch: Any, device: torch.device, dataloader_idx: int
    ) -> Any:
        """Minibatches are where the module is."""
        return batch

    def forward(self, observation: Tensor) -> Tensor:
        """Action values of `observation`."""
        value: Tensor = self.network(observation)
        return value

    def next_batch(self) -> Any:
        """What Lightning calls a batch: a minibatch, or a number of updates."""
        if not self.automatic_optimization:
            return self.chunk_steps
        return self._minibatch()

    def _minibatch(self) -> Any:
        if self.collector_factory is not None:
            return self._collected_batch(self.collector_factory)
        return self.online.next_batch()

    def _collected_batch(self, make: Callable[[nn.Module], BaseCollector]) -> Any:
        assert isinstance(self.learning, TorchRLLearning)
        if self.collector is None:
            self.collector = iter(make(self.policy))
            self.__dict__["returns"] = OneStepReturns(
                self.q_actor, self.gamma, values=self.online.needs_values
            )
        while self._updates_left == 0 or len(self.learning) < self.online.learning_starts:
            data = next(self.collector)
            self.explore.update(self.returns(data))
            if self.bank is not None:
                self.bank.update(data, self.explore.taken(data))
            self.learning.extend(data.reshape(-1))
            self._updates_left = self.updates_per_batch
        self._updates_left -= 1
        return self.learning.sample()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        """The loss of a minibatch; or a chunk of whole updates."""
        if self.automatic_optimization:
            return self._loss(batch)
        self._chunk(batch)
        return None

    def _loss(self, batch: Any) -> Tensor:
        loss, error = self.learning.loss(batch, self.online.epsilon_after())
        self.__dict__["learned"] = batch, error
        self.online.loss = loss.detach().expand(self.runs or 1)
        return loss.sum() if loss.ndim else loss

    def _chunk(self, steps: int) -> None:
        optimizer, scheduler = self._chunk_optimizer(), self.lr_schedulers()
        if self.trainer.max_steps >= 0:
            steps = min(steps, self.trainer.max_steps - self.trainer.global_step)
        for _ in range(steps):
            if self.compiled is not None:
                self.compiled.update(optimizer)
            else:
                self._update(optimizer)
            if scheduler is not None:
                scheduler.step()  # type: ignore[union-attr]
            if self.online.over:
                return

    def _chunk_optimizer(self) -> LightningOptimizer | CountedOptimizer:
        """Lightning's optimiser, without what it does around a step where nobody asks for it."""
        optimizer = self.optimizers()
        assert isinstance(optimizer, LightningOptimizer)
        hook = "on_before_optimizer_step"
        heard = (is_overridden(hook, c, Callback) for c in self.trainer.callbacks)  # type: ignore[attr-defined]
        if self.trainer.scaler is not None or any(heard) or is_overridden(hook, self):
            return optimizer
        return CountedOptimizer(optimizer.optimizer, self.trainer)

    def _update(self, optimizer: LightningOptimizer | CountedOptimizer) -> None:
        """One update of a chunk, eagerly."""
        loss = self._loss(self._minibatch())
        for parameter in self.learned_parameters:
            parameter.grad = None
        if self.trainer.scaler is None:
            loss.backward()  # type: ignore[no-untyped-call]
        else:
            self.manual_backward(loss)
        if self.max_grad_norm is not None:
            gradients = (p.grad for p in self.learned_parameters)
            clip_each_run(gradients, self.max_grad_norm, self.runs or 1)
        optimizer.step()
        self._after_step()

    def _after_step(self) -> None:
        self.learning.after_step(*self.learned)
        self.online.finish()

    def optimizer_step(self, *args: Any, **options: Any) -> None:
        """Step, then do what the algorithm does after learning."""
        super().optimizer_step(*args, **options)
        if self.automatic_optimization:
            self._after_step()

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """The trainer's clipping; each run by itself where there are several."""
        if self.runs is None or gradient_clip_val is None or gradient_clip_algorithm == "value":
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
        else:
            gradients = (p.grad for p in self.learning.parameters())
            clip_each_run(gradients, gradient_clip_val, self.runs)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Stop when every run has had its episodes."""
        self.__dict__["vector_steps"] = self.online.vector_steps
        if not self.log_of_episodes.endless and self.finished:
            self.trainer.should_stop = True

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Play greedy episodes and log ``eval/return`` and ``eval/steps``."""
        if self._can_validate() or self.trainer.state.fn != "fit":
            self._greedy_episodes("eval")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Play greedy episodes and log ``test/return`` and ``test/steps``."""
        self._greedy_episodes("test")

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Greedy actions of a batch of observations."""
        observation = batch[0] if isinstance(batch, list | tuple) else batch
        action: Tensor = self(observation).argmax(-1)
        return action

    def _greedy_episodes(self, name: str) -> None:
        if self._validation_env is None:
            self.__dict__["_validation_env"] = self._other_env()
        env = self._validation_env
        assert env is not None
        wanted = self.eval_episodes * (self.runs or 1)
        rounds = -(-wanted // max(env.batch_size.numel(), 1))
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(self.global_step)
            tests = [
                greedy_tests(
                    env,
                    self.q_actor,
                    gamma=1.0,
                    max_steps=self.max_episode_steps,
                    episode=self.log_of_episodes.done,
                )
                for _ in range(rounds)
            ]
        steps, returns = (torch.stack(column).mean() for column in zip(*tests, strict=True))
        found = {f"{name}/return": returns, f"{name}/steps": steps}
        self.log_dict(found, batch_size=1, sync_dist=True)

    def _can_validate(self) -> bool:
        made = isinstance(self.env_source, EnvBase | gymnasium.Env)
        return self.eval_source is not None or not made

    def _other_env(self) -> EnvBase:
        source = self.env_source if self.eval_source is None else self.eval_source
        if not self._can_validate():
            raise ValueError(
                "Validation needs an environment of its own: pass eval_env=, or a function that "
                "makes the environment as env."
            )
        shape = (self.eval_episodes,) if self.runs is None else (self.runs, self.eval_episodes)
        return as_env(source, shape, "cpu")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save what is needed to go on exactly, of every rank."""
        if not self.online.started:
            return
        own = self.online.state_dict()
        if self.compiled is not None:
            own["acting"] = self.compiled.state_dict()
        checkpoint["state_dict"] |= self.log_of_episodes.state_dict(prefix="log_of_episodes.")
        if world_size() > 1:
            own["state_dict"] = checkpoint["state_dict"]
        checkpoint["online"] = from_all_ranks(own)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Go on from there when training starts."""
        if "online" not in checkpoint:
            return
        ranks = checkpoint["online"]
        own = of_this_rank(ranks) if self._trainer is not None else ranks[0]
        checkpoint["state_dict"] |= own.pop("state_dict", {})
        if self.compiled is not None:
            self.compiled.load_state_dict(own.get("acting", {}))
        self.online.load_state_dict(own)


class _Updates:
    """The batches of an epoch: its length is known, so that Lightning fetches none ahead."""

    def __init__(self, module: EpsilonGreedyDQN) -> None:
        self.module = module

    def __len__(self) -> int:
        return -(-self.module.epoch_steps // self.module.chunk_steps)

    def __iter__(self) -> Iterator[Any]:
        for _ in range(len(self)):
            yield self.module.next_batch()


def _num_actions(env: EnvBase) -> int:
    return int(env.action_spec.space.n)


def _actor(env: EnvBase, q_network: nn.Module, key: NestedKey | None) -> QValueActor:
    """The greedy actor over `q_network`, among legal actions where the environment has a mask."""
    if isinstance(q_network, QValueActor):
        return q_network
    seen = [str(name) for name in env.observation_spec.keys(True, True)]
    key = key or next((name for name in ("observation", "state", "pixels") if name in seen), None)
    if key is None:
        raise ValueError(f"observation_key= must name what the network reads, one of {seen}.")
    return q_actor(
        InItsPrecision(q_network), _num_actions(env), in_key=key, action_mask_key=mask_key(env)
    )


def _values_of(q_actor: QValueActor) -> nn.Module:
    """The network of an actor; C51's atoms are reduced over their support."""
    network: nn.Module = q_actor[0].module
    supports = (getattr(part, "support", None) for part in q_actor.modules())
    support = next((found for found in supports if found is not None), None)
    return network if support is None else MeanOverSupport(network, support)


class MeanOverSupport(nn.Module):
    """The expected action values of a categorical (C51) network.

    Args:
        network (nn.Module): Observations to log-probabilities ``[*batch, atoms, actions]``.
        support (Tensor): The values of the atoms.
    """

    def __init__(self, network: nn.Module, support: Tensor) -> None:
        super().__init__()
        self.network, self.support = network, support

    def forward(self, observation: Tensor) -> Tensor:
        """Action values ``[*batch, actions]``."""
        return categorical_mean(self.network(observation), self.support)


class InItsPrecision(nn.Module):
    """A network that is given its inputs in the precision of its weights.

    Args:
        network (nn.Module): The network.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.__dict__["weight"] = next(network.parameters(), None)

    def forward(self, observation: Tensor) -> Tensor:
        """What the network gives."""
        weight = self.__dict__["weight"]
        if weight is not None and observation.is_floating_point():
            observation = observation.to(weight.dtype)
        value: Tensor = self.network(observation)
        return value
