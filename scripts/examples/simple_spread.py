"""Three agents that share a reward: python scripts/examples/simple_spread.py [vdn|qmix] [frames].

mpe2's simple_spread through PettingZooWrapper. All keys are nested below ``"agent"``;
``batch_shape=[3]`` gives every agent its own posterior, ``[]`` pools their evidence in one.
"""

from __future__ import annotations

import sys

import torch
from loop import flat, learning
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.envs import PettingZooWrapper
from torchrl.modules import MLP, QMixer, QValueModule, VDNMixer
from torchrl.objectives import QMixerLoss

from bmc_torchrl import AdaptiveEGreedyModule, BMCEpsilon, OneStepReturns

AGENTS, GAMMA = 3, 0.9
VALUE, ACTION, CHOSEN = (("agent", name) for name in ("action_value", "action", "chosen"))


def spread() -> PettingZooWrapper:
    try:
        from mpe2 import simple_spread_v3
    except ImportError as error:
        sys.exit(f"{error}: pip install -c constraints.txt '.[examples]'")
    env = simple_spread_v3.parallel_env(N=AGENTS, max_cycles=25, continuous_actions=False)
    return PettingZooWrapper(env, categorical_actions=True, use_mask=False, return_state=True)


def mixer(name: str) -> TensorDictModule:
    if name == "vdn":
        return TensorDictModule(VDNMixer(AGENTS, "cpu"), [CHOSEN], ["chosen_action_value"])
    network = QMixer(state_shape=(18 * AGENTS,), mixing_embed_dim=16, n_agents=AGENTS, device="cpu")
    return TensorDictModule(network, [CHOSEN, "state"], ["chosen_action_value"])


def team_reward(data: TensorDictBase) -> TensorDictBase:
    return flat(data).set(("next", "reward"), flat(data)["next", "agent", "reward"].mean(-2))


def main(
    name: str = "vdn", frames: int = 3_000, per_agent: bool = True
) -> tuple[AdaptiveEGreedyModule, list[TensorDictBase]]:
    torch.manual_seed(0)
    env = spread()
    env.set_seed(0)
    network = MLP(in_features=18, out_features=5, num_cells=[64], activation_class=nn.ReLU)
    q_actor = TensorDictSequential(
        TensorDictModule(network, [("agent", "observation")], [VALUE]),
        QValueModule(
            action_space="categorical", action_value_key=VALUE, out_keys=[ACTION, VALUE, CHOSEN]
        ),
    )
    strategy = BMCEpsilon(alpha0=1.0, beta0=1.01, batch_shape=[AGENTS] if per_agent else [])
    explore = AdaptiveEGreedyModule(env.action_spec, strategy, action_key=ACTION)
    returns = OneStepReturns(
        q_actor,
        gamma=GAMMA,
        action_value_key=VALUE,
        reward_key=("agent", "reward"),
        terminated_key=("agent", "terminated"),
    )
    loss_module = QMixerLoss(q_actor, mixer(name), action_space="categorical", delay_value=True)
    loss_module.set_keys(action_value=VALUE, action=ACTION, local_value=CHOSEN)
    loss_module.make_value_estimator(gamma=GAMMA)
    batches = []
    for data in learning(
        env, q_actor, explore, returns, loss_module, frames=frames, store=team_reward
    ):
        batches.append(data.clone())
    print(f"{name}: ε {[round(float(e), 4) for e in explore.eps.reshape(-1)]}")
    return explore, batches


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(int, sys.argv[2:3]))
