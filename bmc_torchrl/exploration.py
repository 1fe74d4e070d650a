"""``EGreedyModule`` for discrete actions with an ε that adapts, and the returns it learns from."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import expand_as_right, expand_right
from torch import Tensor, nn
from torchrl.data import Composite, TensorSpec
from torchrl.envs.utils import ExplorationType, exploration_type, set_exploration_type

from bmc_torchrl.actions import (
    ActionLayout,
    Choice,
    Replacement,
    UniformAction,
    as_replacement,
)
from bmc_torchrl.functional import (
    categorical_mean,
    epsilon_greedy_action,
    greedy_return,
    uniform_return,
    values_left,
)
from bmc_torchrl.strategies import BMCEpsilon, EpsilonStrategy
from bmc_torchrl.strategies.base import LEAST_EPSILON, PADDING_KEYS, taken_with

__all__ = ["AdaptiveEGreedyModule", "OneStepReturns"]

_FORGOTTEN = "call `explore.update(returns(transition))` for every batch that the collector yields."
VALUE_KEYS = ["chosen_value", "promised_value", "acted_greedily"]
"""Where :class:`OneStepReturns` writes what Q says of the state being left."""

_CAUSES = {
    "mask": "masked as padding, or as of a run that has finished",
    "foreign": "not taken by this policy (drawn at random by the collector, or acted greedily)",
    "nonfinite": "without a finite return or value change, as where Q diverges",
}


class AdaptiveEGreedyModule(TensorDictModuleBase):  # type: ignore[misc]
    r"""ε-greedy exploration whose ε is decided by a strategy.

    A drop-in for ``EGreedyModule``, *for discrete actions*. With probability ε the action is
    replaced by a random legal one. Beside it is written the ε it was taken with. Zero says that
    this policy did not take it: a collector fills that in for frames that it draws at random
    (``init_random_frames``), and :meth:`update` leaves them out. What is less than the smallest
    normal number of 32 bits, such as an ε of zero, is written as that. Data without the entry count
    whole.

    Exploration happens where ``EGreedyModule``'s would: when TorchRL's exploration type is
    ``RANDOM`` or unset. Otherwise the action stays and zero is written: greedy frames, such as an
    evaluation's, teach nothing.

    Args:
        spec (TensorSpec, optional): the action spec (Categorical, OneHot, MultiCategorical,
            MultiOneHot or Binary, or a Composite that holds it), or None to set :attr:`spec` later.
        strategy (EpsilonStrategy, optional): the source of ε. Default: ε-BMC with the paper's
            grid-world prior.
        action_key (NestedKey, optional): where the action is; nested keys explore per element of
            the sub-tensordict. Default: ``"action"``.
        action_mask_key (NestedKey, optional): where the mask of legal actions is. A row without a
            legal action keeps the action it has. Default: all actions are legal.
        epsilon_key (NestedKey, optional): where ε is recorded. Default: ``"epsilon"`` beside the
            action.
        mask_keys (sequence of NestedKey, optional): where :meth:`update` finds what is a real step
            and what is padding; ``()`` for nowhere. Default: where TorchRL's collectors and
            ``split_trajectories`` say it, ``("collector", "mask")`` and ``"mask"``.
        explore (str or Replacement, optional): what replaces the action: ``"uniform"``;
            ``"softmax"``, a :class:`~bmc_torchrl.actions.SoftmaxAction`; ``"zeta"``, a
            :class:`~bmc_torchrl.actions.RepeatedAction` that is held for several steps; or such an
            object. Default: ``"uniform"``.
        temperature (float, optional): of ``"softmax"``. Default: 1.
        action_value_key (NestedKey, optional): where the softmax finds Q. Default:
            ``"action_value"`` beside the action.
        is_init_key (NestedKey, optional): where TorchRL's ``InitTracker`` says that an episode
            begins, which ``"zeta"`` must know. Default: ``"is_init"``.
        device (torch.device or str, optional): where to put the strategy.

    Examples:
        >>> from tensordict import TensorDict
        >>> from torchrl.data import Categorical
        >>> explore = AdaptiveEGreedyModule(Categorical(4), BMCEpsilon(alpha0=1.0, beta0=1.01))
        >>> td = explore(TensorDict({"action": torch.zeros(3, dtype=torch.int64)}, [3]))
        >>> td["epsilon"]
        tensor([0.4975, 0.4975, 0.4975])
        >>> explore
        AdaptiveEGreedyModule(
            explore=UniformAction(),
            strategy=BMCEpsilon(
              eps=0.4975, batch_shape=(), alpha=1, beta=1.01
              (likelihood): StudentTLikelihood(mu0=0, tau0=1, a0=500, b0=500)
            ),
            in_keys=['action'],
            out_keys=['action', 'epsilon'])
    """

    PATIENCE = 10_000
    """After how many calls and steps an ε that has never moved is worth a warning."""

    def __init__(
        self,
        spec: TensorSpec | None,
        strategy: EpsilonStrategy | None = None,
        *,
        action_key: NestedKey = "action",
        action_mask_key: NestedKey | None = None,
        epsilon_key: NestedKey | None = None,
        mask_keys: Sequence[NestedKey] = PADDING_KEYS,
        explore: str | Replacement = "uniform",
        temperature: float = 1.0,
        action_value_key: NestedKey | None = None,
        is_init_key: NestedKey = "is_init",
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if strategy is not None and not isinstance(strategy, EpsilonStrategy):
            raise TypeError(
                f"strategy must be an EpsilonStrategy such as BMCEpsilon(), got {strategy!r}."
            )
        self.action_key, self.action_mask_key = action_key, action_mask_key
        self.epsilon_key = epsilon_key or _beside(action_key, "epsilon")
        self.action_value_key = action_value_key or _beside(action_key, "action_value")
        self.mask_keys = tuple(mask_keys)
        self.is_init_key = is_init_key
        self.explore = as_replacement(explore, temperature)
        self.strategy = strategy if strategy is not None else BMCEpsilon()
        optional = [
            action_mask_key,
            self.action_value_key if self.explore.needs_value else None,
            self.strategy.state_key,
            is_init_key if self.explore.remembers else None,
        ]
        self.in_keys = [action_key, *(key for key in optional if key is not None)]
        self.out_keys = [action_key, self.epsilon_key]
        self._uses, self._updated, self._first_eps = 0, False, self.strategy.eps.clone()
        self._looked = False
        self._spec: TensorSpec | None = None
        self._layout: ActionLayout | None = None
        self._num_actions: int | None = None
        if spec is not None:
            self.spec = spec
        if device is not None:
            self.to(device)

    @property
    def spec(self) -> TensorSpec | None:
        """The action spec, as a Composite that holds it at `action_key`."""
        return self._spec

    @spec.setter
    def spec(self, spec: TensorSpec) -> None:
        composite = isinstance(spec, Composite)
        leaf = spec.get(self.action_key, None) if composite else spec
        if leaf is None:
            raise KeyError(
                f"spec has no entry {self.action_key!r}, only {sorted(map(str, spec.keys(True)))}: "
                "pass action_key=."
            )
        layout = ActionLayout.of(leaf)
        self.explore.require(layout)
        self._layout = layout
        # One index out of so many, all legal: the equation itself will do.
        simple = not (layout.one_hot or layout.multiple) and type(self.explore) is UniformAction
        self._num_actions = layout.sizes[0] if simple and self.action_mask_key is None else None
        self._spec = spec if composite else Composite({self.action_key: leaf})

    @property
    def eps(self) -> Tensor:
        """ε now, one per run: ``[*batch_shape]``."""
        return self.strategy.eps

    def taken(self, transition: TensorDictBase) -> Tensor | None:
        """Where this policy took the action: bool of ε's shape, or None where no ε is recorded.

        Args:
            transition (TensorDictBase): ``[*batch]``.
        """
        return taken_with(transition, self.epsilon_key)

    def update(self, transition: TensorDictBase) -> None:
        """Let the strategy learn from collected data.

        Args:
            transition (TensorDictBase): ``[*batch]`` or ``[*batch, time]``.
        """
        # Inference mode is the cheaper one, and does not compile.
        with torch.no_grad() if torch.compiler.is_compiling() else torch.inference_mode():
            self.strategy.update(transition, self.taken(transition), mask_keys=self.mask_keys)
        if not torch.compiler.is_compiling():
            self._updated = True

    def step(self, frames: int = 1) -> None:
        """``EGreedyModule``'s clock, for strategies that anneal by frames.

        Args:
            frames (int, optional): how many have passed. Default: 1.
        """
        self._count_use()
        self.strategy.step(frames)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Replace the action with probability ε, and record ε.

        Args:
            tensordict (TensorDictBase): what the Q-actor leaves behind.

        Returns:
            `tensordict`.
        """
        acting = tensordict
        if isinstance(self.action_key, tuple) and len(self.action_key) > 1:
            acting = tensordict.get(self.action_key[:-1])
        if not self._looked:
            self._require_own(tensordict, acting.batch_size)
        if exploration_type() not in (ExplorationType.RANDOM, None):
            action = tensordict.get(self.action_key, None)
            device = tensordict.device if action is None else action.device
            return tensordict.set(self.epsilon_key, torch.zeros(acting.batch_size, device=device))
        self._count_use()
        action = self._checked_action(tensordict)
        epsilon = self._epsilon(tensordict, acting)
        if action.device != epsilon.device:
            epsilon = self._moved(epsilon, action.device)
        number, shape = self._num_actions, action.shape
        if number is not None and shape == epsilon.shape and action.dtype == torch.int64:
            # Drawn as EGreedyModule draws them.
            coin = torch.rand_like(epsilon)
            draw = torch.randint(number, shape, device=action.device)
            acted = epsilon_greedy_action(action, epsilon, coin, draw)
        else:
            acted = self._explored(tensordict, action, epsilon)
        tensordict.set(self.action_key, acted)
        return tensordict.set(self.epsilon_key, epsilon.clamp_min(LEAST_EPSILON))

    def _explored(self, tensordict: TensorDictBase, action: Tensor, epsilon: Tensor) -> Tensor:
        """The action of any layout, replaced with probability ε by a legal one."""
        layout, replacement = self._layout_of(), self.explore
        choice = Choice(
            action=action,
            epsilon=epsilon,
            mask=None if self.action_mask_key is None else self._mask(tensordict, action),
            value=self._action_value(tensordict, action) if replacement.needs_value else None,
            first=self._first(tensordict, epsilon) if replacement.remembers else None,
        )
        coin = torch.rand(epsilon.shape, device=action.device)
        shape = (*layout.batch_of(action), replacement.num_draws(layout))
        draws = torch.rand(shape, device=action.device)
        acted: Tensor = replacement(layout, choice, coin, draws)
        return acted

    def _require_own(self, tensordict: TensorDictBase, shape: torch.Size) -> None:
        """Refuse to write over an entry that cannot be what this module wrote a step before."""
        epsilon = tensordict.get(self.epsilon_key, None)
        if epsilon is None:
            return
        own = isinstance(epsilon, Tensor) and epsilon.shape == shape and epsilon.is_floating_point()
        if own and not torch.compiler.is_compiling():
            self._looked, own = True, _may_be_probabilities(epsilon)
        if not own:
            raise ValueError(
                f"The tensordict has an entry {self.epsilon_key!r} that is not ε, which would be "
                "written over it: pass epsilon_key=."
            )

    def _layout_of(self) -> ActionLayout:
        if self._layout is None:
            raise RuntimeError(
                "AdaptiveEGreedyModule has no action spec yet: pass one, or set `explore.spec`."
            )
        return self._layout

    def _checked_action(self, tensordict: TensorDictBase) -> Tensor:
        action: Tensor | None = tensordict.get(self.action_key, None)
        if action is None:
            raise KeyError(
                f"No action at {self.action_key!r}: put the module after the Q-actor, as in "
                "TensorDictSequential(q_actor, explore)."
            )
        layout = self._layout_of()
        if not layout.fits(action):
            raise ValueError(
                f"The action at {self.action_key!r} has shape {tuple(action.shape)}, which is not "
                f"an action of {layout}: pass the spec of the environment's action."
            )
        return action

    def _mask(self, tensordict: TensorDictBase, action: Tensor) -> Tensor:
        mask: Tensor | None = tensordict.get(self.action_mask_key, None)
        if mask is None:
            raise KeyError(f"No action mask at {self.action_mask_key!r} in {tensordict}.")
        expected = self._layout_of().choices_shape(action)
        if mask.shape != expected:
            raise ValueError(
                f"The action mask at {self.action_mask_key!r} has shape {tuple(mask.shape)}: it "
                f"must have one entry per choice, {tuple(expected)}."
            )
        return mask.bool()

    def _action_value(self, tensordict: TensorDictBase, action: Tensor) -> Tensor:
        value: Tensor | None = tensordict.get(self.action_value_key, None)
        needs = f"explore='softmax' needs action values at {self.action_value_key!r}"
        if value is None:
            raise KeyError(f"{needs}, found nothing: pass action_value_key=.")
        expected = self._layout_of().choices_shape(action)
        if value.shape != expected:
            raise ValueError(
                f"{needs} of shape {tuple(expected)}, found {tuple(value.shape)}: pass "
                "action_value_key=, or the spec of the environment's action."
            )
        return value

    def _first(self, tensordict: TensorDictBase, epsilon: Tensor) -> Tensor:
        first: Tensor | None = tensordict.get(self.is_init_key, None)
        if first is None:
            raise KeyError(
                f"explore='zeta' must know where episodes begin, and there is nothing at "
                f"{self.is_init_key!r}: use TransformedEnv(env, InitTracker()), or pass "
                "is_init_key=."
            )
        first = first.bool()
        if first.ndim > tensordict.batch_dims and first.shape != epsilon.shape:
            first = first.squeeze(-1)
        spread: Tensor = expand_as_right(first, epsilon)
        return spread

    def _epsilon(self, tensordict: TensorDictBase, acting: TensorDictBase) -> Tensor:
        epsilon = self.strategy.epsilon(tensordict).type(torch.get_default_dtype())
        shape = acting.batch_size
        if epsilon.shape == shape:
            return epsilon
        if epsilon.shape != shape[: epsilon.ndim]:
            # Agents, with the environments pooled: as in the update, what does not fit the front.
            agents = shape[tensordict.batch_dims :]
            if agents and epsilon.shape == agents:
                return epsilon.expand(shape)
            raise ValueError(
                f"ε has one value per run, shape {tuple(epsilon.shape)}, but the action has batch "
                f"size {tuple(shape)}: build the strategy with batch_shape={list(shape)}, or () to "
                "share one ε."
            )
        spread: Tensor = expand_right(epsilon, shape)
        return spread

    def _moved(self, epsilon: Tensor, device: torch.device) -> Tensor:
        """ε on the action's device, if the strategy has nothing that could be there already."""
        if next(self.strategy.buffers(), None) is None:
            return epsilon.to(device)
        raise RuntimeError(
            f"The action is on {device} and the exploration module on {epsilon.device}: "
            f"move the module with .to({str(device)!r})."
        )

    def _count_use(self) -> None:
        """Warn, once, if the update seems to be forgotten: in a worker, too, ε says so."""
        if torch.compiler.is_compiling():
            return
        self.__dict__["_uses"] += 1  # A module's own assignment costs ten times as much.
        if self._uses != self.PATIENCE or not self.strategy.needs_update:
            return
        eps = self.eps
        why = self._why_still() if eps.equal(self._first_eps.to(eps.device)) else None
        if why is not None:
            used = f"{type(self).__name__} has been used {self._uses} times"
            warnings.warn(f"{used} and ε is still {float(eps.mean()):.3g}: {why}", stacklevel=3)

    def _why_still(self) -> str | None:
        """Why ε has not moved; None if it only waits, or if nobody but its strategy knows."""
        parts = [part for part, _ in self.strategy.parts() if part.needs_update]
        skipped = {
            cause: sum(int(part.skipped[cause].sum()) for part in parts if cause in part.skipped)
            for cause in _CAUSES
        }
        counts = [(part.waits, part.learned) for part in parts]
        learned = sum(int(count.sum()) for _, count in counts if count is not None)
        if learned and any(waits for waits, _ in counts):
            return None
        left_out = [f"{number} {_CAUSES[cause]}" for cause, number in skipped.items() if number]
        if left_out:
            return f"`update` left out frames, {'; '.join(left_out)}; it learned from {learned}."
        if learned:
            return (
                f"`update` learned from {learned} frames, and in none of them did the greedy and "
                "the uniform return differ enough to tell the models apart: are all action values "
                "equal?"
            )
        return None if self._updated else _FORGOTTEN


class OneStepReturns(TensorDictModuleBase):  # type: ignore[misc]
    r"""Writes the two models' returns of a transition: act greedily from s′ on, or uniformly.

    :math:`G^Q = r + \gamma\max_a Q(s', a)` and :math:`G^U = r + \gamma\,\mathrm{mean}_a Q(s', a)`,
    without the bootstrap where the episode terminated (not where it was truncated), over legal
    actions only, with C51's atoms reduced over their support, and with :math:`\gamma^n` where
    ``MultiStep`` wrote ``"steps_to_next_obs"``.

    With ``values=True`` it also writes what Q says of the state being left, for
    :class:`~bmc_torchrl.ExplorationWinsEpsilon`: ``"chosen_value"``, :math:`Q(s, a)`;
    ``"promised_value"``, :math:`\max Q(s, \cdot)`; and ``"acted_greedily"``, whether the action is
    the greedy one. This asks `q_actor` a second time.

    Args:
        q_actor (TensorDictModuleBase): what writes the action values of an observation, without
            exploration.
        gamma (float): discount factor.
        reward_key (NestedKey, optional): where the reward is, below ``"next"``.
            Default: ``"reward"``.
        terminated_key (NestedKey, optional): where the end of the episode is, below ``"next"``;
            None to bootstrap from terminal states too, as the published data do.
            Default: ``"terminated"``.
        action_value_key (NestedKey, optional): where `q_actor` writes Q.
            Default: ``"action_value"``.
        action_mask_key (NestedKey, optional): where the legal actions are, below ``"next"``.
            Default: taken from the Q-actor's QValueModule.
        greedy_return_key (NestedKey, optional): where :math:`G^Q` goes.
            Default: ``"greedy_return"``.
        uniform_return_key (NestedKey, optional): where :math:`G^U` goes.
            Default: ``"uniform_return"``.
        values (bool, optional): whether to write the values of the state being left.
            Default: False.
        action_key (NestedKey, optional): where the action taken is, if they are written.
            Default: ``"action"``.

    Examples:
        >>> from tensordict import TensorDict
        >>> from torchrl.modules import QValueActor
        >>> q_actor = QValueActor(
        ...     nn.Linear(3, 2), in_keys=["observation"], action_space="categorical"
        ... )
        >>> returns = OneStepReturns(q_actor, gamma=0.9)
        >>> end = {"observation": torch.ones(3), "reward": torch.ones(1)}
        >>> end["terminated"] = torch.ones(1, dtype=torch.bool)
        >>> returns(TensorDict({"next": end}))["greedy_return"]
        tensor(1.)
    """

    def __init__(
        self,
        q_actor: TensorDictModuleBase,
        gamma: float,
        *,
        reward_key: NestedKey = "reward",
        terminated_key: NestedKey | None = "terminated",
        action_value_key: NestedKey = "action_value",
        action_mask_key: NestedKey | None = None,
        greedy_return_key: NestedKey = "greedy_return",
        uniform_return_key: NestedKey = "uniform_return",
        values: bool = False,
        action_key: NestedKey = "action",
    ) -> None:
        super().__init__()
        if not 0 <= gamma <= 1:
            raise ValueError(f"gamma must be between 0 and 1, got {gamma}.")
        if action_value_key not in q_actor.out_keys:
            raise ValueError(
                f"q_actor writes {q_actor.out_keys}, not {action_value_key!r}: pass a QValueActor, "
                "or action_value_key=."
            )
        self.q_actor, self.gamma = q_actor, gamma
        self.action_value_key = action_value_key
        self.action_mask_key = action_mask_key or _attribute(q_actor, "action_mask_key")
        self._sizes = _attribute(q_actor, "var_nums")
        # The modules, because their tensors may be moved; in a list, to be registered only once.
        self._supports = [part for part in q_actor.modules() if hasattr(part, "support")]
        self.reward_key, self.terminated_key = reward_key, terminated_key
        keys = [reward_key, terminated_key, self.action_mask_key, *q_actor.in_keys]
        self.in_keys = list(dict.fromkeys(_below("next", key) for key in keys if key is not None))
        self.return_keys = [greedy_return_key, uniform_return_key]
        self.out_keys = list(self.return_keys)
        self.action_key, self.values = action_key, values
        if values:
            self.in_keys += [action_key, *q_actor.in_keys]
            self.out_keys += VALUE_KEYS

    @torch.no_grad()
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write both returns, each of the action values' leading shape.

        Args:
            tensordict (TensorDictBase): transitions ``[*batch]``.

        Returns:
            `tensordict`.
        """
        missing = [key for key in self.in_keys if tensordict.get(key, None) is None]
        if missing:
            raise KeyError(
                f"OneStepReturns needs {missing} in the transition, which has "
                f"{sorted(map(str, tensordict.keys(True, True)))}."
            )
        after = tensordict.get("next")
        value = self.action_value(after)
        mask = None if self.action_mask_key is None else after.get(self.action_mask_key).bool()
        ended = None if self.terminated_key is None else after.get(self.terminated_key)
        reward = _like(after.get(self.reward_key), value)
        gamma = self._discount(tensordict, reward)
        ended = None if ended is None else _like(ended, value)
        each = self._each_variable(value, mask)
        for key, function in zip(self.return_keys, (greedy_return, uniform_return), strict=True):
            bootstraps = [
                function(torch.zeros_like(reward), v, gamma, terminated=ended, action_mask=m)
                for v, m in each
            ]
            tensordict.set(key, sum(bootstraps, start=reward))
        if self.values:
            self._write_values(tensordict)
        return tensordict

    def _each_variable(
        self, value: Tensor, mask: Tensor | None
    ) -> list[tuple[Tensor, Tensor | None]]:
        """The values and mask of each action variable, of which Q is the sum, as TorchRL's is."""
        sizes = self._sizes or [value.shape[-1]]
        masks = [None] * len(sizes) if mask is None else torch.split(mask, sizes, -1)
        return list(zip(torch.split(value, sizes, -1), masks, strict=True))

    def _write_values(self, tensordict: TensorDictBase) -> None:
        value, action = self.action_value(tensordict), tensordict.get(self.action_key)
        mask = None if self.action_mask_key is None else tensordict.get(self.action_mask_key).bool()
        each = self._each_variable(value, mask)
        sizes = [v.shape[-1] for v, _ in each]
        if action.shape == value.shape:
            indices = [one_hot.int().argmax(-1) for one_hot in torch.split(action, sizes, -1)]
        else:
            shape = (*value.shape[:-1], len(sizes))
            indices = list(action.reshape(shape).long().unbind(-1))
        left = [values_left(v, a, m) for (v, m), a in zip(each, indices, strict=True)]
        chosen, promised, greedily = (torch.stack(part) for part in zip(*left, strict=True))
        found = (chosen.sum(0), promised.sum(0), greedily.all(0))
        for key, entry in zip(VALUE_KEYS, found, strict=True):
            tensordict.set(key, entry)

    def action_value(self, tensordict: TensorDictBase) -> Tensor:
        """Q of an observation.

        Args:
            tensordict (TensorDictBase): a transition, or its ``"next"`` part, ``[*batch]``.

        Returns:
            ``[*batch, actions]``.
        """
        with set_exploration_type(ExplorationType.DETERMINISTIC):
            written = self.q_actor(tensordict.select(*self.q_actor.in_keys, strict=False))
        value: Tensor = written.get(self.action_value_key)
        for part in self._supports:
            if part.support is not None:
                return categorical_mean(value, part.support)
        return value

    def _discount(self, tensordict: TensorDictBase, reward: Tensor) -> float | Tensor:
        steps = tensordict.get("steps_to_next_obs", None)
        return self.gamma if steps is None else self.gamma ** steps.reshape(reward.shape)


def _may_be_probabilities(value: Tensor) -> bool:
    if value.device.type != "cpu":
        return True  # It is not worth a wait for the device.
    try:
        return bool(((value >= 0) & (value <= 1)).all())
    except RuntimeError:  # Under vmap there are no values.
        return True


def _beside(key: NestedKey, name: str) -> NestedKey:
    return (*key[:-1], name) if isinstance(key, tuple) and len(key) > 1 else name


def _below(root: str, key: NestedKey) -> NestedKey:
    return (root, *key) if isinstance(key, tuple) else (root, key)


def _attribute(module: nn.Module, name: str) -> Any:
    """The first not-None attribute `name` of a module or what it contains."""
    found = (getattr(part, name, None) for part in module.modules())
    return next((value for value in found if value is not None), None)


def _like(value: Tensor, action_value: Tensor) -> Tensor:
    """A ``[*batch, 1]`` or ``[*batch]`` entry in the leading shape of ``[*batch, actions]``."""
    return value.squeeze(-1) if value.ndim == action_value.ndim else value
