"""The lockstep engines by learner, with the arguments of ``training.learners``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from bmc_torchrl.envs import CartPoleEnv, SubgoalGridEnv, SupplyChainEnv
from bmc_torchrl.envs.base import BatchedEnv
from bmc_torchrl.learners.values import QNetwork
from bmc_torchrl.lockstep.numba.tabular import NumbaTabularEngine
from bmc_torchrl.lockstep.torch_dqn import DQNLockstep
from bmc_torchrl.strategies import EpsilonStrategy

__all__ = ["Engine", "expected_sarsa", "published_dqn"]


class Engine(Protocol):
    """Many runs, advanced a chunk at a time; results are ``[runs, episodes]``, NaN at first."""

    episodes: int

    @property
    def finished(self) -> bool:
        """Whether every run has had its episodes and tests."""
        ...

    @property
    def episodes_done(self) -> Tensor:
        """Finished episodes of each run, ``[runs]``."""
        ...

    @property
    def steps(self) -> Tensor:
        """Mean steps of the tests."""
        ...

    @property
    def returns(self) -> Tensor:
        """Mean discounted return of the tests."""
        ...

    @property
    def epsilons(self) -> Tensor:
        """Mean ε of each training episode."""
        ...

    def advance(self, steps: int) -> None:
        """Take up to `steps` steps of every run, and the tests that come due."""
        ...

    def write_strategy(self, strategy: EpsilonStrategy, /) -> None:
        """Give `strategy` what the runs have learned, if it has not got it yet."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on exactly from here."""
        ...

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Go on from a saved state."""
        ...


def _domain(env: BatchedEnv) -> Any:
    if isinstance(env, SubgoalGridEnv):
        return env.grid
    if isinstance(env, CartPoleEnv):
        return env.model
    if isinstance(env, SupplyChainEnv):
        return env.network
    raise TypeError(f"The lockstep engine has no domain {type(env).__name__}.")


def expected_sarsa(
    env: BatchedEnv,
    strategy: EpsilonStrategy,
    *,
    gamma: float,
    episodes: int,
    tests: int,
    seed: int,
    learning_rate: float,
    decay: float = 1.0,
    floor: float = 0.0,
    initializer: Literal["zeros", "normal", "uniform"] = "zeros",
    scale: float = 0.1,
    mask_terminated: bool = False,
    next_action: Literal["before", "after"] = "before",
    stop_after_perfect_tests: int | None = None,
    first_run: int = 0,
    threads: int | None = None,
) -> NumbaTabularEngine:
    """Expected SARSA in tables; see :class:`~bmc_torchrl.lockstep.numba.tabular`."""
    return NumbaTabularEngine(
        _domain(env),
        strategy,
        runs=env.batch_size.numel(),
        episodes=episodes,
        tests=tests,
        max_steps=env.max_steps or 200,
        gamma=gamma,
        learning_rate=learning_rate,
        learning_rate_decay=decay,
        learning_rate_floor=floor,
        table=initializer,
        scale=scale,
        mask_terminated=mask_terminated,
        next_action=next_action,
        stop_after_perfect_tests=stop_after_perfect_tests,
        seed=seed,
        first_run=first_run,
        threads=threads,
    )


def published_dqn(
    env: BatchedEnv,
    strategy: EpsilonStrategy,
    *,
    gamma: float,
    episodes: int,
    tests: int,
    seed: int,
    hidden: Sequence[int],
    learning_rate: float,
    batch_size: int,
    capacity: int,
    epochs: int,
    l2: float = 0.0,
    mask_terminated: bool = False,
    next_action: Literal["after"] = "after",
    stop_after_perfect_tests: int | None = None,
    first_run: int = 0,
    threads: int | None = None,
    compiled: bool = True,
) -> DQNLockstep:
    """The published DQN; see :class:`~bmc_torchrl.lockstep.torch_dqn.DQNLockstep`.

    Weights and draws come from `seed` and `first_run` together.
    """
    if next_action != "after":
        raise ValueError(f"next_action={next_action!r} is for expected SARSA; DQN acts after.")
    if threads is not None:
        torch.set_num_threads(threads)
    raw = isinstance(env, CartPoleEnv)
    with torch.random.fork_rng():
        torch.manual_seed(seed + first_run)
        network = QNetwork(
            4 if raw else env.num_features,
            env.num_actions,
            hidden,
            runs=env.batch_size.numel(),
            active_features=None if raw else len(env.sizes),
            device=env.device,
        )
    return DQNLockstep(
        env,
        network,
        strategy,
        learning_rate=learning_rate,
        batch_size=batch_size,
        capacity=capacity,
        epochs=epochs,
        l2=l2,
        episodes=episodes,
        gamma=gamma,
        tests=tests,
        mask_terminated=mask_terminated,
        stop_after_perfect_tests=stop_after_perfect_tests,
        seed=seed + first_run,
        compiled=compiled,
    )
