"""How an action spec lays out its choices, and what replaces an action, on the device."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import torch
from tensordict.utils import expand_as_right
from torch import Tensor
from torchrl.data import (
    Binary,
    Categorical,
    MultiCategorical,
    MultiOneHot,
    OneHot,
    TensorSpec,
)

from bmc_torchrl.functional import legal_action_at, normalised_value, uniform_action, zeta_cdf
from bmc_torchrl.precision import KeepsPrecision

__all__ = [
    "ActionLayout",
    "Choice",
    "RepeatedAction",
    "Replacement",
    "SoftmaxAction",
    "UniformAction",
    "as_replacement",
]


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
        return torch.Size((*self.batch_of(action), sum(self.sizes)))

    def batch_of(self, action: Tensor) -> torch.Size:
        """Shape of the batch of actions.

        Args:
            action (Tensor): the actions.

        Returns:
            ``[*batch]``.
        """
        return action.shape[:-1] if self.one_hot or self.multiple else action.shape

    def from_uniform(self, draws: Tensor, mask: Tensor | None, like: Tensor) -> Tensor:
        """Uniform legal actions.

        Args:
            draws (Tensor): uniform on [0, 1), ``[*batch]`` or ``[*batch, variables]``.
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
            uniform_action(column, size) if legal is None else legal_action_at(column, legal)
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

    @property
    def num_actions(self) -> int:
        """How many actions there are, those of several variables multiplied."""
        return math.prod(self.sizes)

    def number(self, action: Tensor) -> Tensor:
        """Which of :attr:`num_actions` an action is, the last variable's choice changing fastest.

        Args:
            action (Tensor): the action.

        Returns:
            int64 ``[*batch]``.
        """
        if self.one_hot:
            parts = torch.split(action, list(self.sizes), -1)
            indices = [part.to(torch.uint8).argmax(-1) for part in parts]
        else:
            indices = list(action.long().unbind(-1)) if self.multiple else [action.long()]
        number = indices[0]
        for index, size in zip(indices[1:], self.sizes[1:], strict=True):
            number = number * size + index
        return number

    def _choices(self, number: Tensor) -> list[Tensor]:
        found = []
        for size in reversed(self.sizes):
            found.append(number % size)
            number = number // size
        return found[::-1]

    def numbered(self, number: Tensor, like: Tensor) -> Tensor:
        """The action of a :meth:`number`.

        Args:
            number (Tensor): int64 ``[*batch]``.
            like (Tensor): an action.

        Returns:
            Actions in the shape and dtype of `like`.
        """
        return self._encode(self._choices(number), like)

    def allows(self, number: Tensor, mask: Tensor) -> Tensor:
        """Where the action of a :meth:`number` is legal.

        Args:
            number (Tensor): int64 ``[*batch]``.
            mask (Tensor): ``[*batch, sum of sizes]``, True where legal.

        Returns:
            bool ``[*batch]``.
        """
        parts = torch.split(mask, list(self.sizes), -1)
        chosen = [
            part.gather(-1, index.unsqueeze(-1)).squeeze(-1)
            for part, index in zip(parts, self._choices(number), strict=True)
        ]
        return torch.stack(chosen).all(0)

    def _encode(self, indices: list[Tensor], like: Tensor) -> Tensor:
        if self.one_hot:
            # Not F.one_hot, which reads the indices back to check their range.
            parts = [
                index.unsqueeze(-1) == torch.arange(size, device=index.device)
                for index, size in zip(indices, self.sizes, strict=True)
            ]
            return torch.cat(parts, -1).to(like.dtype)
        return (torch.stack(indices, -1) if self.multiple else indices[0]).to(like.dtype)


class Choice(NamedTuple):
    """What is known where an action may be replaced.

    Args:
        action (Tensor): the greedy action, ``[*batch]`` or ``[*batch, …]``, as its layout says.
        epsilon (Tensor): the probability to explore, ``[*batch]``.
        mask (Tensor, optional): ``[*batch, sum of sizes]``, True where legal. Default: all are.
        value (Tensor, optional): Q(s, ·), ``[*batch, sum of sizes]``, where it is needed.
        first (Tensor, optional): ``[*batch]``, True where an episode begins. Default: nowhere.
    """

    action: Tensor
    epsilon: Tensor
    mask: Tensor | None = None
    value: Tensor | None = None
    first: Tensor | None = None


class Replacement(KeepsPrecision, ABC):
    """What replaces the greedy action where the coin says "explore".

    A subclass defines :meth:`random_action`, a pure function of uniform numbers; one that acts over
    several steps defines :meth:`forward` instead, and has a memory.
    """

    needs_value = False
    """Whether it reads Q(s, ·)."""

    remembers = False
    """Whether what it does depends on the steps before, so that it must know where episodes end."""

    def require(self, layout: ActionLayout) -> None:
        """Raise unless actions of `layout` can be replaced.

        Args:
            layout (ActionLayout): of the actions.
        """

    def num_draws(self, layout: ActionLayout) -> int:
        """How many uniform numbers it takes beside the coin.

        Args:
            layout (ActionLayout): of the actions.

        Returns:
            One per action variable, unless a subclass says more.
        """
        return len(layout.sizes)

    @abstractmethod
    def random_action(self, layout: ActionLayout, choice: Choice, draws: Tensor) -> Tensor:
        """An action to explore with.

        Args:
            layout (ActionLayout): of the actions.
            choice (Choice): what is known.
            draws (Tensor): uniform on [0, 1), ``[*batch, num_draws]``.

        Returns:
            Actions in the shape and dtype of the greedy ones, legal where one is.
        """

    def forward(self, layout: ActionLayout, choice: Choice, coin: Tensor, draws: Tensor) -> Tensor:
        """The action to take.

        Args:
            layout (ActionLayout): of the actions.
            choice (Choice): what is known.
            coin (Tensor): uniform on [0, 1), ``[*batch]``.
            draws (Tensor): likewise, ``[*batch, num_draws]``.

        Returns:
            Actions in the shape and dtype of the greedy ones.
        """
        random = self.random_action(layout, choice, draws)
        explores = coin < choice.epsilon
        if explores.shape != random.shape:
            explores = expand_as_right(explores, random)
        if choice.mask is not None:
            explores = explores & layout.has_legal(choice.mask, choice.action)
        return torch.where(explores, random, choice.action)

    def start(self, batch: Sequence[int], device: torch.device | str | None = None) -> None:
        """Begin anew; only what remembers does anything.

        Args:
            batch (sequence of int): shape of the batch that is acted on.
            device (torch.device or str, optional): where that is. Default: where the module is.
        """

    def end(self, done: Tensor) -> None:
        """Forget the episodes that have ended; only what remembers does anything.

        Args:
            done (Tensor): bool ``[*batch]``.
        """


class UniformAction(Replacement):
    """Any legal action, each as likely as the others: ε-greedy.

    Examples:
        >>> layout, draws = ActionLayout.of(Categorical(4)), torch.tensor([[0.1], [0.9]])
        >>> choice = Choice(action=torch.tensor([1, 1]), epsilon=torch.ones(2))
        >>> UniformAction()(layout, choice, torch.zeros(2), draws)
        tensor([0, 3])
    """

    def random_action(self, layout: ActionLayout, choice: Choice, draws: Tensor) -> Tensor:
        """See :meth:`Replacement.random_action`."""
        which = draws if layout.multiple else draws.squeeze(-1)
        return layout.from_uniform(which, choice.mask, choice.action)


class SoftmaxAction(Replacement):
    r"""A draw from softmax(Q̃ / temperature), Q̃ being Q(s, ·) scaled to [−1, 1] in every state.

    So VDBE-Softmax explores (Tokic & Palm 2011): better actions more often, whatever the scale of
    rewards. With equal values it is uniform.

    Args:
        temperature (float, optional): the higher, the more uniform. Default: 1.

    Examples:
        >>> SoftmaxAction(temperature=0.5)
        SoftmaxAction(temperature=0.5)
    """

    needs_value = True

    def __init__(self, temperature: float = 1.0) -> None:
        super().__init__()
        if not 0 < temperature < float("inf"):
            raise ValueError(f"temperature must be positive and finite, got {temperature}.")
        self.temperature = temperature

    def require(self, layout: ActionLayout) -> None:
        """One action variable.

        Args:
            layout (ActionLayout): of the actions.
        """
        if layout.multiple:
            raise ValueError(
                "explore='softmax' needs one action variable, got a multi-action spec."
            )

    def num_draws(self, layout: ActionLayout) -> int:
        """One per action.

        Args:
            layout (ActionLayout): of the actions.

        Returns:
            Their number.
        """
        return layout.num_actions

    def random_action(self, layout: ActionLayout, choice: Choice, draws: Tensor) -> Tensor:
        """See :meth:`Replacement.random_action`."""
        assert choice.value is not None
        logits = normalised_value(choice.value, choice.mask) / self.temperature
        return layout.from_softmax(logits, draws, choice.mask, choice.action)

    def extra_repr(self) -> str:
        """The temperature."""
        return f"temperature={self.temperature:g}"


class RepeatedAction(Replacement):
    r"""A uniform legal action, held for n steps with :math:`P(n) \propto n^{-\mu}`: εz-greedy.

    Temporally extended exploration (Dabney, Ostrovski & Barreto, ICLR 2021): most flips of the coin
    last a step, few last long, and those lead away from what greedy actions revisit. The coin is
    not thrown while an action is held, so that more than a share ε of the steps explores. A new
    episode, or a mask without the action, ends it; that step's coin is thrown as any other.

    What is held is remembered per element of the batch, which is that of the first call. It is part
    of ``state_dict`` and moves with the module, but it is no buffer: processes that share the
    weights of a policy must not hold each other's actions.

    Args:
        mu (float, optional): exponent :math:`\mu > 1`; the larger, the shorter. Default: 2.
        longest (int, optional): the longest that an action is held. Default: 10000.

    Examples:
        >>> RepeatedAction()
        RepeatedAction(mu=2, longest=10000)
    """

    remembers = True

    def __init__(self, mu: float = 2.0, longest: int = 10_000) -> None:
        super().__init__()
        if not 1 < mu < float("inf"):
            raise ValueError(f"mu must be above 1 and finite, got {mu}.")
        if longest < 1:
            raise ValueError(f"longest must be at least 1, got {longest}.")
        self.mu, self.longest = mu, longest
        self.cdf: Tensor
        self.register_buffer("cdf", zeta_cdf(mu, longest), persistent=False)
        self.memory: tuple[Tensor, Tensor] | None = None

    def require(self, layout: ActionLayout) -> None:
        """Fewer actions than an integer can number.

        Args:
            layout (ActionLayout): of the actions.
        """
        if layout.num_actions >= 2**63:
            raise ValueError(f"explore='zeta' numbers actions, of which {layout} has too many.")

    def num_draws(self, layout: ActionLayout) -> int:
        """One per action variable, and one for how long.

        Args:
            layout (ActionLayout): of the actions.

        Returns:
            Their number.
        """
        return len(layout.sizes) + 1

    def random_action(self, layout: ActionLayout, choice: Choice, draws: Tensor) -> Tensor:
        """See :meth:`Replacement.random_action`."""
        which = draws[..., :-1] if layout.multiple else draws[..., 0]
        return layout.from_uniform(which, choice.mask, choice.action)

    def length(self, draws: Tensor) -> Tensor:
        """For how many steps an action is held.

        Args:
            draws (Tensor): uniform on [0, 1), ``[*batch]``.

        Returns:
            int64 ``[*batch]``, at least 1.
        """
        return torch.searchsorted(self.cdf, draws.to(self.cdf.dtype), right=True) + 1

    def forward(self, layout: ActionLayout, choice: Choice, coin: Tensor, draws: Tensor) -> Tensor:
        """Go on with what is held, or flip the coin."""
        if layout.batch_of(choice.action) != choice.epsilon.shape:
            raise ValueError(
                f"explore='zeta' holds one action per element of a batch, and the action has shape "
                f"{tuple(choice.action.shape)} where the batch size is "
                f"{tuple(choice.epsilon.shape)}: pass a spec and actions with no further dimension."
            )
        held, left = self._remembered(choice.epsilon)
        if choice.first is not None:
            self.end(choice.first)
        goes_on = left > 0
        begins = coin < choice.epsilon
        if choice.mask is not None:
            goes_on = goes_on & layout.allows(held, choice.mask)
            has_legal = layout.has_legal(choice.mask, choice.action)
            begins = begins & (has_legal.squeeze(-1) if has_legal.ndim > begins.ndim else has_legal)
        begins = begins & ~goes_on
        random = self.random_action(layout, choice, draws)
        number = torch.where(begins, layout.number(random), held)
        fresh = torch.where(begins, self.length(draws[..., -1]), torch.ones_like(left)) - 1
        left.copy_(torch.where(goes_on, left - 1, fresh))
        held.copy_(number)
        explores = goes_on | begins
        if explores.shape != choice.action.shape:
            explores = expand_as_right(explores, choice.action)
        return torch.where(explores, layout.numbered(number, choice.action), choice.action)

    def start(self, batch: Sequence[int], device: torch.device | str | None = None) -> None:
        """Hold nothing, in so many elements.

        Args:
            batch (sequence of int): their shape.
            device (torch.device or str, optional): where they are. Default: where the module is.
        """
        where = self.cdf.device if device is None else device
        zeros = [torch.zeros(tuple(batch), dtype=torch.int64, device=where) for _ in range(2)]
        self.memory = zeros[0], zeros[1]

    def _remembered(self, like: Tensor) -> tuple[Tensor, Tensor]:
        if self.memory is None:
            self.start(like.shape, like.device)
        assert self.memory is not None
        known = self.memory[1].shape
        if known != like.shape:
            raise ValueError(
                f"explore='zeta' holds actions of a batch of size {tuple(known)}, and is given "
                f"one of {tuple(like.shape)}: build a module for each, or call "
                f"explore.start({list(like.shape)}) to begin anew."
            )
        return self.memory

    def end(self, done: Tensor) -> None:
        """Hold nothing where an episode has ended.

        Args:
            done (Tensor): bool ``[*batch]``.
        """
        if self.memory is not None:
            left = self.memory[1]
            left.copy_(torch.where(done, torch.zeros_like(left), left))

    def get_extra_state(self) -> dict[str, Tensor]:
        """What is held, and for how many more steps; nothing before the first call."""
        return {} if self.memory is None else dict(zip(("held", "left"), self.memory, strict=True))

    def set_extra_state(self, state: dict[str, Tensor]) -> None:
        """Hold it.

        Args:
            state (dict): of :meth:`get_extra_state`.
        """
        if not state:
            self.memory = None
            return
        held, left = (state[name].to(self.cdf.device, copy=True) for name in ("held", "left"))
        self.memory = held, left

    def __getstate__(self) -> dict[str, Any]:
        """With a copy of the memory: what is sent to another process would be shared with it."""
        memory = None if self.memory is None else [part.tolist() for part in self.memory]
        return {**self.__dict__, "memory": memory}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take it back from numbers."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if self.memory is not None:
            held, left = (torch.tensor(part, device=self.cdf.device) for part in self.memory)
            self.memory = held, left

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        if self.memory is not None:
            held, left = (fn(part) for part in self.memory)
            self.memory = held, left
        return self

    def extra_repr(self) -> str:
        """Its parameters."""
        return f"mu={self.mu:g}, longest={self.longest}"


def as_replacement(explore: str | Replacement, temperature: float = 1.0) -> Replacement:
    """A replacement by its short form, or itself.

    Args:
        explore (str or Replacement): ``"uniform"``, ``"softmax"``, ``"zeta"``, or an object.
        temperature (float, optional): of the softmax. Default: 1.

    Returns:
        The object.

    Examples:
        >>> as_replacement("zeta")
        RepeatedAction(mu=2, longest=10000)
    """
    if isinstance(explore, Replacement):
        return explore
    known: dict[str, Replacement] = {
        "uniform": UniformAction(),
        "softmax": SoftmaxAction(temperature),
        "zeta": RepeatedAction(),
    }
    if explore not in known:
        raise ValueError(
            "explore must be 'uniform', 'softmax', 'zeta' or a Replacement such as "
            f"RepeatedAction(mu=2.0), got {explore!r}."
        )
    return known[explore]
