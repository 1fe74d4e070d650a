"""Our module on a TorchRL with the patches of docs/upstream; run by test_upstream_patches.py."""

import dqn_trainer
import pytest
import torch
import torchrl.modules
from contracts import ACTIONS
from tensordict import TensorDict
from tensordict.nn import TensorDictSequential
from torchrl.collectors import Collector
from torchrl.modules import QValueActor, set_exploration_modules_spec_from_env

from bmc_torchrl import AdaptiveEGreedyModule, BMCEpsilon
from bmc_torchrl.envs import CartPoleEnv


def test_a_collector_fills_the_spec():
    env = CartPoleEnv(batch_size=[2], observation="encoded")
    explore = AdaptiveEGreedyModule(None)
    network = torch.nn.LazyLinear(2)
    q_actor = QValueActor(network, in_keys=["observation"], spec=env.action_spec_unbatched)
    policy = TensorDictSequential(q_actor, explore)
    options = {"frames_per_batch": 20, "total_frames": 20, "auto_register_policy_transforms": False}
    for data in Collector(env, policy, **options):
        assert explore.taken(data).all()
    assert explore.spec["action"] == env.action_spec_unbatched


def test_a_spec_that_is_given_is_kept():
    env = CartPoleEnv(batch_size=[2])
    explore = AdaptiveEGreedyModule(env.action_spec_unbatched)
    spec = explore.spec
    set_exploration_modules_spec_from_env(explore, env)
    assert explore.spec is spec


def test_the_posterior_is_ours():
    gamma = 0.9
    following = TensorDict(
        reward=torch.randn(200, 1),
        terminated=torch.rand(200, 1) < 0.1,
        action_value=5 * torch.randn(200, ACTIONS),
        batch_size=[200],
    )
    theirs = torchrl.modules.BMCEpsilon(1.0, 1.5, gamma=gamma)
    theirs.update(TensorDict(next=following, batch_size=[200]))
    ours = BMCEpsilon(alpha0=1.0, beta0=1.5)
    value, bootstrap = (
        following["action_value"].double(),
        gamma * (~following["terminated"]).double(),
    )
    returns = {
        "greedy_return": following["reward"] + bootstrap * value.amax(-1, keepdim=True),
        "uniform_return": following["reward"] + bootstrap * value.mean(-1, keepdim=True),
    }
    ours.update(TensorDict(returns, [200]))
    torch.testing.assert_close(theirs.alpha, ours.alpha, rtol=1e-9, atol=0)
    torch.testing.assert_close(theirs.beta, ours.beta, rtol=1e-9, atol=0)


@pytest.mark.filterwarnings("ignore:DQNTrainer is an experimental")
def test_the_trainer_logs_our_epsilon():
    trainer = dqn_trainer.build(frames=200, frames_per_batch=50)
    trainer.train()
    # The example's own entry has the ε that a batch was taken with, not yet the last one.
    last = float(trainer.greedy_module.eps)
    assert min(trainer._log_dict["epsilon"]) == pytest.approx(last, rel=1e-12)
