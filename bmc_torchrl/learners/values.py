"""Action values with one independent copy of the weights per run: a table and a network."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict.utils import NestedKey
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torchrl.data import Categorical
from torchrl.modules import QValueActor

from bmc_torchrl.envs.factored import active_features

__all__ = ["ActiveFeatures", "QNetwork", "QTable", "RunLinear", "q_actor"]

Initializer = Callable[[Tensor], object]


def _run_shape(runs: Sequence[int] | int) -> tuple[int, ...]:
    return (runs,) if isinstance(runs, int) else tuple(runs)


def _check_runs(values: Tensor, run_shape: tuple[int, ...], trailing: int) -> None:
    leading = values.shape[: values.ndim - trailing]
    if tuple(leading[: len(run_shape)]) != run_shape:
        raise ValueError(
            f"The input has shape {tuple(values.shape)}, but there is one copy of Q per run: its "
            f"leading dimensions must be runs={run_shape}. Put the run dimension first, or build "
            "Q with runs=() to share one copy."
        )


def _rows(weight: Tensor, index: Tensor, runs: int) -> Tensor:
    """Rows `index` ``[*runs, *batch]`` of `weight` ``[*runs, rows, width]``, of each run's own."""
    rows, width = weight.shape[-2:]
    shape = index.shape
    if runs > 1:
        offset = torch.arange(0, runs * rows, rows, device=index.device)
        index = index.reshape(runs, -1) + offset.unsqueeze(-1)
    return F.embedding(index.reshape(shape), weight.reshape(-1, width))


class QTable(nn.Module):
    r"""A table of action values for each run, read by state index.

    Mathematically ``Linear(num_states, num_actions, bias=False)`` on the one-hot state, at the cost
    of reading one row.

    Args:
        num_states: rows of each table; states are ``0 … num_states - 1``.
        num_actions: columns of each table.
        runs: shape of the leading run dimensions; ``()`` is one table for any leading dimensions.
        initializer: ``"zeros"``, ``"normal"`` (`scale` · N(0, 1)), ``"uniform"`` (U[0, `scale`]),
            or a function that fills the weight in place.
        scale: see `initializer`.
        device: where the weight is created.
        dtype: floating dtype of the weight.

    The weight has shape ``[*runs, num_states, num_actions]``.

    Examples:
        >>> table = QTable(num_states=3, num_actions=2, runs=4)
        >>> table(torch.tensor([0, 2, 1, 1])).shape
        torch.Size([4, 2])
        >>> table(torch.zeros(4, 7, dtype=torch.int64)).shape
        torch.Size([4, 7, 2])
    """

    def __init__(
        self,
        num_states: int,
        num_actions: int,
        *,
        runs: Sequence[int] | int = (),
        initializer: str | Initializer = "zeros",
        scale: float = 0.1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_states, self.num_actions = num_states, num_actions
        self.run_shape = _run_shape(runs)
        self.initialize = _initializer(initializer, scale)
        shape = (*self.run_shape, num_states, num_actions)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the tables afresh from the global generator."""
        with torch.no_grad():
            self.initialize(self.weight)

    def forward(self, state: Tensor) -> Tensor:
        """Action values ``[*runs, *batch, actions]`` of `state` ``[*runs, *batch]``."""
        _check_runs(state, self.run_shape, trailing=0)
        return _rows(self.weight, state, math.prod(self.run_shape))


def _initializer(kind: str | Initializer, scale: float) -> Initializer:
    if callable(kind):
        return kind
    kinds: dict[str, Initializer] = {
        "zeros": nn.init.zeros_,
        "normal": functools.partial(nn.init.normal_, std=scale),
        "uniform": functools.partial(nn.init.uniform_, b=scale),
    }
    if kind not in kinds:
        raise ValueError(
            f"initializer={kind!r} is unknown; use one of {sorted(kinds)} or a callable."
        )
    return kinds[kind]


class RunLinear(nn.Module):
    r"""An affine layer with independent weights per run, initialised as Keras' ``Dense``.

    Glorot-uniform weight ``[*runs, in, out]``, zero bias ``[*runs, out]``. With `indices`, the
    input is the int64 positions ``[*runs, *batch, k]`` of the ones in an otherwise zero input.

    Examples:
        >>> layer = RunLinear(5, 3, runs=(2,))
        >>> layer(torch.randn(2, 7, 5)).shape
        torch.Size([2, 7, 3])
        >>> layer(torch.tensor([[0, 4], [1, 3]]), indices=True).shape
        torch.Size([2, 3])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        runs: Sequence[int] | int = (),
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.run_shape = _run_shape(runs)
        self.in_features, self.out_features = in_features, out_features
        shape = (*self.run_shape, in_features, out_features)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        shape = (*self.run_shape, out_features)
        self.bias = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight afresh from the global generator; the bias is zero."""
        limit = math.sqrt(6 / (self.in_features + self.out_features))
        nn.init.uniform_(self.weight, -limit, limit)
        nn.init.zeros_(self.bias)

    def forward(self, features: Tensor, indices: bool = False) -> Tensor:
        """The layer's output ``[*runs, *batch, out]``."""
        if not self.run_shape and not indices:
            if features.ndim == 2:
                return torch.addmm(self.bias, features, self.weight)
            return F.linear(features, self.weight.mT, self.bias)
        runs, leading = math.prod(self.run_shape), features.shape[:-1]
        bias = self.bias.reshape(runs, 1, self.out_features)
        if indices:
            summed = _rows(self.weight, features, runs).sum(-2)
            output = summed.reshape(runs, -1, self.out_features) + bias
        else:
            weight = self.weight.reshape(runs, self.in_features, self.out_features)
            output = torch.baddbmm(bias, features.reshape(runs, -1, self.in_features), weight)
        return output.reshape(*leading, self.out_features)


class QNetwork(nn.Module):
    r"""A multilayer perceptron of action values with independent weights per run.

    Args:
        in_features: width of the (dense) input.
        num_actions: number of outputs.
        hidden: widths of the hidden ReLU layers.
        runs: shape of the leading run dimensions; ``()`` is one network for any leading dimensions.
        dueling: Q = V + A − mean(A), with V and A two linear heads on the last hidden layer.
        active_features: number `k` of ones in each input, where inputs are multi-hot. The network
            then also takes the int64 positions of the ones, ``[*runs, *batch, k]``, and its first
            layer sums `k` rows instead of multiplying by zeros.
        device: where the weights are created.
        dtype: floating dtype of the weights.

    Examples:
        >>> network = QNetwork(16, 4, hidden=(25, 25), runs=3, active_features=3)
        >>> network(torch.randn(3, 24, 16)).shape
        torch.Size([3, 24, 4])
        >>> network(torch.tensor([[0, 5, 10]] * 3)).shape
        torch.Size([3, 4])
    """

    def __init__(
        self,
        in_features: int,
        num_actions: int,
        hidden: Sequence[int] = (25, 25),
        *,
        runs: Sequence[int] | int = (),
        dueling: bool = False,
        active_features: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.num_actions = in_features, num_actions
        self.run_shape, self.active_features = _run_shape(runs), active_features
        options: dict[str, Any] = {"runs": self.run_shape, "device": device, "dtype": dtype}
        widths = [in_features, *hidden, num_actions]
        self.layers = nn.ModuleList(
            RunLinear(fan_in, fan_out, **options) for fan_in, fan_out in itertools.pairwise(widths)
        )
        self.state_value = RunLinear(widths[-2], 1, **options) if dueling else None

    def reset_parameters(self) -> None:
        """Draw all weights afresh from the global generator."""
        for layer in self.modules():
            if isinstance(layer, RunLinear):
                layer.reset_parameters()

    def forward(self, features: Tensor) -> Tensor:
        """Action values ``[*runs, *batch, actions]``.

        Args:
            features: ``[*runs, *batch, in_features]``, or int64 indices
                ``[*runs, *batch, active_features]``.
        """
        _check_runs(features, self.run_shape, trailing=1)
        indices = self.active_features is not None and not features.is_floating_point()
        width = self.active_features if indices else self.in_features
        if features.shape[-1] != width:
            raise ValueError(
                f"The input's last dimension is {features.shape[-1]}, not {width}: pass floats "
                f"[..., in_features={self.in_features}] or, with active_features, int64 indices "
                f"[..., active_features={self.active_features}]."
            )
        if not indices:
            # A target network's weights are plain tensors, which parameters() does not find.
            weight = self.layers[0].weight
            assert isinstance(weight, Tensor)
            features = features.to(weight.dtype)
        *inner, last = self.layers
        for layer in inner:
            features = layer(features, indices).relu()
            indices = False
        advantage: Tensor = last(features, indices)
        if self.state_value is None:
            return advantage
        value: Tensor = self.state_value(features, indices)
        return value + advantage - advantage.mean(-1, keepdim=True)


class ActiveFeatures(nn.Module):
    r"""Positions of the ones in the concatenated one-hot encodings of a state's coordinates.

    The state index counts the coordinates in row-major order, as ``torch.unravel_index`` does.
    Replay then stores one integer per state, and `QNetwork(active_features=len(sizes))` reads it.

    Args:
        sizes: number of values of each coordinate.

    Examples:
        >>> ActiveFeatures((5, 5, 6))(torch.tensor([0, 149]))
        tensor([[ 0,  5, 10],
                [ 4,  9, 15]])
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        self.sizes = tuple(sizes)

    def forward(self, state: Tensor) -> Tensor:
        """Feature indices ``[*batch, len(sizes)]`` of `state` ``[*batch]``."""
        return active_features(state, self.sizes)


def q_actor(
    network: nn.Module,
    num_actions: int,
    *,
    in_key: NestedKey = "state",
    action_mask_key: NestedKey | None = None,
    **options: Any,
) -> QValueActor:
    """TorchRL's greedy actor over `network`: `in_key` in; action, action_value and its maximum out.

    Actions are categorical: of tied actions the first is taken, where one-hot actions would be
    multi-hot. `options` are those of :class:`~torchrl.modules.QValueActor`.

    Examples:
        >>> from tensordict import TensorDict
        >>> actor = q_actor(QTable(3, 2, runs=4), num_actions=2)
        >>> actor(TensorDict({"state": torch.tensor([0, 1, 2, 0])}, [4]))["action"]
        tensor([0, 0, 0, 0])
    """
    return QValueActor(
        network,
        in_keys=[in_key],
        spec=Categorical(num_actions),
        action_mask_key=action_mask_key,
        **options,
    )
