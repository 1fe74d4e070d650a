"""Greedy test episodes."""

from __future__ import annotations

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import expand_as_right
from torch import Tensor
from torchrl.envs import EnvBase
from torchrl.envs.utils import ExplorationType, set_exploration_type

__all__ = ["greedy_tests"]


@torch.no_grad()
def greedy_tests(
    env: EnvBase,
    actor: TensorDictModuleBase,
    *,
    gamma: float,
    max_steps: int,
    check_every: int = 20,
    runs: Tensor | None = None,
    one_by_one: bool = False,
    episode: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Steps and discounted return of one greedy episode in every environment of a batch.

    Args:
        env: of batch size ``[*batch]``.
        actor: the greedy policy.
        gamma: discount factor of the return.
        max_steps: where an episode is cut.
        check_every: steps between two looks at whether all episodes have ended, the only times
            when the host waits for the device.
        runs: which runs, the first dimension of the batch, are tested; the others' results mean
            nothing.
        one_by_one: whether `env` steps its copies one by one, where ``"_step"`` says so: those of
            other runs, and of episodes that have ended, are left alone then.
        episode: the training episode of each run that is tested, int64 ``[runs]``: what an
            environment starts from whose state has an entry ``"episode"``, as that of
            :class:`~bmc_torchrl.envs.tabular.TabularEnv` where the task changes.

    Returns:
        Steps and return, each float32 ``[*batch]``.
    """
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        current = _first_state(env, episode)
        alive = torch.ones(env.batch_size, device=env.device)
        if one_by_one:
            check_every = 1
            if runs is not None:
                alive *= expand_as_right(runs, alive)
        steps, returns = torch.zeros_like(alive), torch.zeros_like(alive)
        discount = 1.0
        for count in range(1, max_steps + 1):
            chosen = actor(current)
            if one_by_one:
                chosen.set("_step", alive.bool())
            stepped, current = env.step_and_maybe_reset(chosen)
            following = stepped.get("next")
            steps += alive
            returns += discount * alive * following.get("reward").squeeze(-1)
            discount *= gamma
            alive = alive * ~following.get("done").squeeze(-1)
            if count % check_every == 0 and not bool(alive.any()):
                break
    return steps, returns


def _first_state(env: EnvBase, episode: Tensor | None) -> TensorDictBase:
    if episode is None or env.state_spec.get("episode", None) is None:
        return env.reset()
    shape = (-1, *[1] * (len(env.batch_size) - 1)) if env.batch_size else ()
    number = episode.to(env.device).reshape(shape).expand(env.batch_size).clone()
    return env.reset(TensorDict({"episode": number}, env.batch_size, device=env.device))
