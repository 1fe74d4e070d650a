"""The DQN that the numba kernels make up: equal to the torch engine, resuming, what it refuses."""

import dataclasses
import io

import numpy as np
import pytest
import torch
from kernel_cases import double, strategies
from lockstep_reference import DOMAINS, DQN, PENALISED, RUNS, STRATEGIES, make_env, make_network

from bmc_torchrl.envs.lanes import Noise
from bmc_torchrl.learners.settings import RunSettings
from bmc_torchrl.lockstep import DQNDraws, DQNLockstep
from bmc_torchrl.lockstep.numba.dqn import NumbaDQNEngine
from bmc_torchrl.lockstep.numba.loops import CURVES

RUN = RunSettings(gamma=0.9, episodes=50, seed=3)


def make(domain, strategy, runs=RUNS, learner=DQN, **options):
    env = make_env(domain, runs)
    own = {"threads": 1} | {k: options.pop(k) for k in ("threads", "network") if k in options}
    run = dataclasses.replace(RUN, **options)
    made = STRATEGIES[strategy](env, runs) if isinstance(strategy, str) else strategy
    return NumbaDQNEngine(env, made, run, learner, **own)


def draws_of(domain, uniforms):
    """The same uniforms as the torch engine takes them."""
    lanes = make_env(domain).lanes()
    act, step, reset, sample = torch.split(uniforms, [2, 1, 4, DQN.batch_size], -1)
    noise = Noise(step[..., : lanes.draws].double(), reset[..., : lanes.resets].float())
    return DQNDraws(act.mT.float().contiguous(), noise, sample.contiguous())


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("domain", DOMAINS)
def test_both_engines_learn_equal_networks_from_equal_draws(domain, strategy, mask, random):
    """To float32's rounding: products are summed in another order, and Adam divides by a size."""
    env, steps = make_env(domain), 60
    run = dataclasses.replace(RUN, mask_terminated=mask)
    network = make_network(env)
    loops = make(domain, strategy, learner=PENALISED, network=network, mask_terminated=mask)
    tensors = DQNLockstep(
        env, STRATEGIES[strategy](env, RUNS), run, PENALISED, network=network, compiled=False
    )
    uniforms = double(steps, RUNS, 7 + DQN.batch_size, random=random)
    uniforms[..., :2], uniforms[..., 3:7] = uniforms[..., :2].float(), uniforms[..., 3:7].float()
    start = loops.state_dict()
    tensors.state.copy_(start["physics" if domain == "cart" else "state"])
    inputs = tensors._inputs(tensors.state.unsqueeze(1))
    tensors.value.copy_(tensors.network.forward(tensors.flat, inputs)[-1].squeeze(-1))
    loops.advance(steps, uniforms=uniforms)
    with torch.no_grad():
        tensors.vector_steps(draws_of(domain, uniforms), 0)
    now = loops.state_dict()
    assert torch.equal(loops.episodes_done, tensors.episodes_done)
    if domain == "cart":
        torch.testing.assert_close(now["physics"], tensors.state, rtol=1e-4, atol=1e-5)
    else:
        assert torch.equal(now["state"], tensors.state)
    torch.testing.assert_close(now["sums"], tensors.sums.mT, rtol=1e-4, atol=1e-5)
    ours, theirs = (make_network(env) for _ in range(2))
    loops.export(ours), tensors.export(theirs)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=2e-3)
    learned = STRATEGIES[strategy](env, RUNS)
    loops.write_strategy(learned)
    for key, value in tensors.strategy.state_dict().items():
        torch.testing.assert_close(learned.state_dict()[key], value, rtol=1e-4, atol=1e-5)
