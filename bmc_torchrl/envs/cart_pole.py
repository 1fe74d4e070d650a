"""Cart-pole with Gymnasium's physics, and the binning that makes it tabular ([GSL19], §5.2)."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import Unbounded

from bmc_torchrl.envs.base import BatchedEnv
from bmc_torchrl.envs.factored import ravel_index
from bmc_torchrl.envs.lanes import LaneDomain, Number, Numbers
from bmc_torchrl.envs.uniforms import uniform

__all__ = ["CartPole", "CartPoleEnv", "cart_pole_bins", "cart_pole_step"]


@dataclass(frozen=True)
class CartPole:
    """Constants of Gymnasium's ``CartPole-v1``, and the bins of the paper.

    The physics state is (position, velocity, angle, angular velocity) in SI units and radians.

    Attributes:
        gravity: Acceleration of free fall.
        cart_mass: Mass of the cart.
        pole_mass: Mass of the pole.
        half_length: Half the pole's length.
        force: Size of the push, to the left (action 0) or right (action 1).
        tau: Seconds per step of the explicit Euler scheme.
        position_limit: The episode ends beyond it.
        angle_limit: The episode ends beyond it: the pole has fallen.
        initial_bound: Each entry of an initial state is uniform on ± this.
        step_reward: Reward of a step.
        fall_reward: Reward of the step that ends the episode; Gymnasium's own is 1.
        bins: Number of bins per entry of the physics state.
        bounds: Entries are clipped to ± these before binning. With the defaults only 4 of the 6
            angle bins are reached before the pole has fallen, hence the paper's 108 cells.

    >>> math.prod(CartPole().bins)
    162
    """

    gravity: float = 9.8
    cart_mass: float = 1.0
    pole_mass: float = 0.1
    half_length: float = 0.5
    force: float = 10.0
    tau: float = 0.02
    position_limit: float = 2.4
    angle_limit: float = math.radians(12)
    initial_bound: float = 0.05
    step_reward: float = 1.0
    fall_reward: float = 0.0
    bins: Sequence[int] = (3, 3, 6, 3)
    bounds: Sequence[float] = (4.8, 0.5, math.radians(24), math.radians(50))

    def __post_init__(self) -> None:
        object.__setattr__(self, "bins", tuple(int(count) for count in self.bins))
        object.__setattr__(self, "bounds", tuple(float(bound) for bound in self.bounds))
        if len(self.bins) != 4 or min(self.bins) < 1:
            raise ValueError(f"bins must be four positive counts, got {self.bins}.")
        if len(self.bounds) != 4 or min(self.bounds) <= 0:
            raise ValueError(f"bounds must be four positive half-widths, got {self.bounds}.")
        for name in (
            "cart_mass",
            "pole_mass",
            "half_length",
            "tau",
            "position_limit",
            "angle_limit",
        ):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}.")


PAPER_CART_POLE = CartPole()


def cart_pole_step(
    physics: Tensor, action: Tensor, model: CartPole = PAPER_CART_POLE
) -> tuple[Tensor, Tensor, Tensor]:
    """One Euler step of every cart of a batch.

    Args:
        physics: Position, velocity, angle, angular velocity; floating ``[*batch, 4]``.
        action: 0 pushes left, 1 right; int64 ``[*batch]``.
        model: The constants.

    Returns:
        Next physics state ``[*batch, 4]``, reward float32 ``[*batch]``, termination bool
        ``[*batch]``.

    >>> cart_pole_step(torch.zeros(4), torch.tensor(1))[0]
    tensor([ 0.0000,  0.1951,  0.0000, -0.2927])
    """
    position, velocity, angle, spin = physics.unbind(-1)
    force = (2.0 * action.to(physics.dtype) - 1.0) * model.force
    cosine, sine = angle.cos(), angle.sin()
    mass = model.pole_mass + model.cart_mass
    moment = model.pole_mass * model.half_length
    push = (force + moment * spin.square() * sine) / mass
    inertia = model.half_length * (4.0 / 3.0 - model.pole_mass * cosine.square() / mass)
    spin_rate = (model.gravity * sine - cosine * push) / inertia
    acceleration = push - moment * spin_rate * cosine / mass
    position = position + model.tau * velocity
    velocity = velocity + model.tau * acceleration
    angle = angle + model.tau * spin
    spin = spin + model.tau * spin_rate
    terminated = (position.abs() > model.position_limit) | (angle.abs() > model.angle_limit)
    reward = model.step_reward + (model.fall_reward - model.step_reward) * terminated.float()
    return torch.stack([position, velocity, angle, spin], -1), reward, terminated


def cart_pole_bins(physics: Tensor, model: CartPole = PAPER_CART_POLE) -> Tensor:
    r"""Index of the cell of a physics state, int64 ``[*batch]``.

    Entry :math:`x` with bound :math:`h` and :math:`k` bins falls into bin
    :math:`\mathrm{round}((k - 1)(x + h) / 2h)`, clipped to :math:`[0, k)`; halves round to even.

    >>> cart_pole_bins(torch.zeros(4))
    tensor(79)
    """
    digits = [
        ((count - 1) * ((entry + bound) / (2 * bound))).round().clamp(0, count - 1).long()
        for entry, bound, count in zip(physics.unbind(-1), model.bounds, model.bins, strict=True)
    ]
    return ravel_index(digits, model.bins)


class CartPoleLanes(LaneDomain):
    """Lanes whose state is the physics ``[*lanes, 4]``."""

    record_width = 4
    resets = 4

    def __init__(self, env: CartPoleEnv) -> None:
        super().__init__(env)
        if env.physics_dtype != torch.float32:
            raise ValueError(f"The engine steps float32 physics, got dtype={env.physics_dtype}.")
        self.model = env.model
        self.num_features, self.ones = 4, 0
        # Pushed one way from the outermost start, the paper's pole needs 8 steps to fall.
        self.shortest_episode = min(6, self.max_steps) if env.model == CartPole() else 1

    def start(self, reset: Tensor, episode: Tensor) -> Tensor:
        return (2.0 * reset - 1.0) * self.model.initial_bound

    def step(self, state: Tensor, action: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return cart_pole_step(state, action, self.model)

    def index(self, state: Tensor) -> Tensor:
        return cart_pole_bins(state, self.model)

    def record(self, state: Tensor) -> Tensor:
        return state

    def restore(self, record: Tensor) -> Tensor:
        return record

    def encode(self, state: Tensor) -> Tensor:
        return state.mT


class CartPoleScalars(NamedTuple):
    """One run: :func:`cart_pole_step` and :func:`cart_pole_bins` operation by operation.

    The constants have the precision of the physics, so that only sine and cosine, of which each
    library has its own, differ in the last bit.
    """

    gravity: Number
    mass: Number
    pole_mass: Number
    half_length: Number
    moment: Number
    four_thirds: Number
    force: Number
    tau: Number
    position_limit: Number
    angle_limit: Number
    initial_bound: Number
    step_reward: Number
    fall_change: Number
    bounds: Numbers
    widths: Numbers
    last_bins: Numbers
    bins: Numbers

    def start(self, u: Numbers, episode: Number) -> tuple[Numbers, Number]:
        position, velocity = 2.0 * u[0] - 1.0, 2.0 * u[1] - 1.0
        angle, spin = 2.0 * u[2] - 1.0, 2.0 * u[3] - 1.0
        bound = self.initial_bound
        return (position * bound, velocity * bound, angle * bound, spin * bound), 0

    def step(self, p: Numbers, state: Number, action: Number, u: Number) -> tuple[Any, ...]:
        position, velocity, angle, spin = p
        sine, cosine = math.sin(angle), math.cos(angle)
        force = self.force if action == 1 else -self.force
        push = (force + self.moment * (spin * spin) * sine) / self.mass
        inertia = self.half_length * (
            self.four_thirds - self.pole_mass * (cosine * cosine) / self.mass
        )
        spin_rate = (self.gravity * sine - cosine * push) / inertia
        acceleration = push - self.moment * spin_rate * cosine / self.mass
        position = position + self.tau * velocity
        velocity = velocity + self.tau * acceleration
        angle = angle + self.tau * spin
        spin = spin + self.tau * spin_rate
        fell = abs(position) > self.position_limit or abs(angle) > self.angle_limit
        reward = self.step_reward + self.fall_change if fell else self.step_reward
        return (position, velocity, angle, spin), state, reward, fell

    def cell(self, p: Numbers, state: Number) -> Number:
        index = 0
        for j in range(4):
            last = self.last_bins[j]
            scaled = np.rint(last * ((p[j] + self.bounds[j]) / self.widths[j]))
            index = index * self.bins[j] + np.int64(min(max(scaled, last - last), last))
        return index

    def noisy(self) -> bool:
        return False


@functools.cache
def _renderer() -> Any:
    import gymnasium  # It is an extra.

    made = gymnasium.make("CartPole-v1", render_mode="rgb_array")
    made.reset()
    return made


class CartPoleEnv(BatchedEnv):
    """Cart-pole as a batch of environments.

    Keys: ``"physics"`` ``[*batch, 4]``, the state itself; ``"state"`` int64 ``[*batch]``, its cell;
    with ``observation="encoded"`` also ``"observation"`` float32 ``[*batch, 4]``, the raw physics
    state that DQN reads.

    Args:
        model: Constants and bins; Gymnasium's and the paper's by default.
        dtype: Precision of the physics.
        **options: ``observation``, ``batch_size``, ``device``, ``max_steps`` and
            ``one_hot_actions``, as in :class:`~bmc_torchrl.envs.base.BatchedEnv`.

    >>> env = CartPoleEnv(batch_size=[2], observation="encoded")
    >>> env.reset()["observation"].shape
    torch.Size([2, 4])
    """

    def __init__(
        self,
        model: CartPole = PAPER_CART_POLE,
        *,
        dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> None:
        if not dtype.is_floating_point:
            raise ValueError(f"dtype must be a floating-point type, got {dtype}.")
        self.__dict__["physics_dtype"] = dtype
        super().__init__(sizes=model.bins, num_actions=2, **options)
        self.model = model

    def lanes(self) -> CartPoleLanes:
        """See :class:`~bmc_torchrl.envs.lanes.LaneDomain`."""
        return CartPoleLanes(self)

    def scalars(self) -> CartPoleScalars:
        """See :class:`~bmc_torchrl.envs.lanes.ScalarDomain`."""
        if self.physics_dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"numba has no {self.physics_dtype}: build env with dtype=torch.float32 or float64."
            )
        model: Any = self.model
        real: Any = np.float32 if self.physics_dtype == torch.float32 else np.float64
        return CartPoleScalars(
            gravity=real(model.gravity),
            mass=real(model.pole_mass + model.cart_mass),
            pole_mass=real(model.pole_mass),
            half_length=real(model.half_length),
            moment=real(model.pole_mass * model.half_length),
            four_thirds=real(4.0 / 3.0),
            force=real(model.force),
            tau=real(model.tau),
            position_limit=real(model.position_limit),
            angle_limit=real(model.angle_limit),
            initial_bound=real(model.initial_bound),
            step_reward=np.float32(model.step_reward),
            fall_change=np.float32(model.fall_reward - model.step_reward),
            bounds=tuple(real(bound) for bound in model.bounds),
            widths=tuple(real(2 * bound) for bound in model.bounds),
            last_bins=tuple(real(count - 1) for count in model.bins),
            bins=model.bins,
        )

    def picture(self, current: TensorDictBase, steps: int) -> Any:
        """The cart, drawn by Gymnasium."""
        _renderer().unwrapped.state = current["physics"].tolist()
        return _renderer().render()

    def _code_table(self) -> None:
        return None

    def _hidden_spec(self) -> dict[str, Any]:
        shape = (*self.batch_size, 4)
        return {"physics": Unbounded(shape=shape, dtype=self.physics_dtype, device=self.device)}

    def _observation_spec(self) -> Any:
        return Unbounded(shape=(*self.batch_size, 4), device=self.device)

    def _observe(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        physics = state["physics"]
        seen = {"observation": physics.float()} if self.observation == "encoded" else {}
        return {"physics": physics, "state": cart_pole_bins(physics, self.model), **seen}

    def _given_state(self, tensordict: TensorDictBase) -> dict[str, Tensor]:
        physics = tensordict.get("physics", None)
        if physics is None:
            raise ValueError(
                'reset(set_state=True) needs "physics" [*batch, 4]; a cell is not enough.'
            )
        return {"physics": physics.to(self.physics_dtype)}

    def _initial_state(self) -> dict[str, Tensor]:
        draws = uniform((*self.batch_size, 4), self.physics_dtype, self.device)
        return {"physics": (2.0 * draws - 1.0) * self.model.initial_bound}

    def _next_state(
        self, tensordict: TensorDictBase, action: Tensor
    ) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        physics, reward, terminated = cart_pole_step(tensordict.get("physics"), action, self.model)
        return {"physics": physics}, reward, terminated
