"""Whole trajectories of the numba loops against those of the tensor functions."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from kernel_cases import DOMAINS, LEARNERS, RUNS, SMALL_NETWORK, called, double, strategies
from tensordict import TensorDict

from bmc_torchrl import LinearEpsilon, functional
from bmc_torchrl.envs import (
    CartPole,
    SubgoalGrid,
    cart_pole_bins,
    cart_pole_step,
    subgoal_grid_step,
    supply_chain_step,
)
from bmc_torchrl.envs.factored import ravel_index, unravel_index
from bmc_torchrl.envs.poisson import poisson_cdf, poisson_demand
from bmc_torchrl.functional import (
    epsilon_greedy_action,
    greedy_return,
    uniform_action,
    uniform_return,
)
from bmc_torchrl.learners.objectives import tabular_update
from bmc_torchrl.lockstep.numba.loops import CURVES, Rule, greedy_episodes
from bmc_torchrl.lockstep.numba.tabular import NumbaTabularEngine, _scratch

DEFINITIONS = {
    "grid_world": SubgoalGrid(),
    "cart_pole": CartPole(),
    "supply_chain": SMALL_NETWORK,
}


class Reference:
    """The lockstep engine's order in the package's tensor functions, one vector step a call."""

    def __init__(self, name, start, strategy=None, *, max_steps=0, run=None, learner=None):
        self.name, self.strategy, self.run, self.learner = name, strategy, run, learner
        self.domain = DEFINITIONS[name]
        self.max_steps = max_steps
        self.table, self.state, self.physics = (start[k] for k in ("table", "state", "physics"))
        self.action = torch.zeros_like(self.state)
        self.count, self.episodes = torch.zeros_like(self.state), torch.zeros_like(self.state)
        self.sums, self.logged = torch.zeros(3, len(self.state), dtype=torch.float64), {}

    def epsilon(self, state):
        return self.strategy.epsilon(TensorDict({"state": state}, [len(state)])).float()

    def act(self, state, epsilon, draws):
        values = self.table[torch.arange(len(state)), state]
        coin, which = draws.float().unbind(-1)
        random_action = uniform_action(which, values.shape[-1])
        return epsilon_greedy_action(values.argmax(-1), epsilon, coin, random_action)

    def move(self, action, uniform):
        if self.name == "grid_world":
            return subgoal_grid_step(self.state, action, self.domain)
        if self.name == "cart_pole":
            self.physics, reward, terminated = cart_pole_step(self.physics, action, self.domain)
            return cart_pole_bins(self.physics, self.domain), reward, terminated
        stocks = torch.stack(unravel_index(self.state, self.domain.sizes), -1)
        demand = poisson_demand(uniform, poisson_cdf(self.domain.demand_rate[0])).unsqueeze(-1)
        stocks, reward, terminated = supply_chain_step(stocks, action, demand, self.domain)
        return ravel_index(stocks.unbind(-1), self.domain.sizes), reward, terminated

    def start(self, uniforms):
        if self.name == "cart_pole":
            fresh = (2.0 * uniforms.to(self.physics) - 1.0) * self.domain.initial_bound
            return fresh, cart_pole_bins(fresh, self.domain)
        return torch.zeros_like(self.physics), torch.full_like(self.state, self.domain.start_state)

    def rate(self):
        rate = self.learner.learning_rate * self.learner.decay ** self.episodes.double()
        return rate.clamp(min=self.learner.floor).float()

    def step(self, uniforms):
        runs = torch.arange(len(self.state))
        chosen = self.act(self.state, self.epsilon(self.state), uniforms[:, :2])
        first = (self.count == 0) | (self.run.next_action == "after")
        action = torch.where(first, chosen, self.action)
        after, reward, terminated = self.move(action, uniforms[:, 2].contiguous())
        epsilon = self.epsilon(after)
        following = self.act(after, epsilon, uniforms[:, 7:])
        values = self.table[runs, after]
        ended = terminated if self.run.mask_terminated else None
        greedy = greedy_return(reward, values, self.run.gamma, terminated=ended)
        uniform = uniform_return(reward, values, self.run.gamma, terminated=ended)
        target = functional.mixture_return(greedy, uniform, epsilon)
        error = target - self.table[runs, self.state, action]
        change = tabular_update(self.table, self.state, action, target, self.rate())
        self.count += 1
        self.sums += torch.stack([epsilon, reward, error.square()])
        done = terminated | (self.count >= self.max_steps)
        transition = {
            "state": self.state,
            "value_change": change,
            "greedy_return": greedy,
            "uniform_return": uniform,
            "next": {"done": done.unsqueeze(-1)},
        }
        self.strategy.update(TensorDict(transition, [len(runs)]))
        for run in done.nonzero().flatten().tolist():
            epsilon, reward, loss = self.sums[:, run] / self.count[run]
            self.logged[run, self.episodes[run].item()] = {
                "epsilons": epsilon,
                "train_returns": reward * self.count[run],
                "losses": loss,
                "train_steps": self.count[run],
                **{name: value[run] for name, value in self.strategy.diagnostics().items()},
            }
        physics, state = self.start(uniforms[:, 3:7])
        self.state = torch.where(done, state, after)
        self.physics = torch.where(done.unsqueeze(-1), physics, self.physics)
        self.action = following
        self.episodes += done
        self.count = self.count * ~done
        self.sums = self.sums * ~done


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "before", "physics_dtype"),
    [
        *((name, before, torch.float64) for name in DOMAINS for before in (True, False)),
        # Pole and rounding error both grow by e every 13 steps: episodes are short here.
        ("cart_pole", True, torch.float32),
    ],
)
def test_trajectories_equal_those_of_the_tensor_functions(name, before, physics_dtype, random):
    options = {"dtype": physics_dtype} if name == "cart_pole" else {}
    env = DOMAINS[name](batch_size=[12], max_steps=40, **options)
    build = lambda: strategies(env.num_states, env.num_actions)  # noqa: E731
    order = "before" if before else "after"
    run = replace(RUNS[name], episodes=10_000, next_action=order, mask_terminated=not before)
    engine = NumbaTabularEngine(env, build(), run, LEARNERS[name], threads=1)
    strategy = build()
    reference = Reference(
        name, engine.state_dict(), strategy, max_steps=40, run=run, learner=LEARNERS[name]
    )
    for _ in range(4):
        uniforms = double(60, 12, 9, random=random).float().double()
        uniforms[..., 2] = double(60, 12, random=random)
        engine.advance(60, uniforms=uniforms)
        for row in uniforms:
            reference.step(row)
        now = engine.state_dict()
        torch.testing.assert_close(now["state"], reference.state)
        torch.testing.assert_close(engine.episodes_done, reference.episodes)
        torch.testing.assert_close(engine.table, reference.table, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(now["physics"], reference.physics, rtol=1e-4, atol=1e-5)
    assert engine.episodes_done.min() >= 240 // 40
    found = {name: getattr(engine, name) for name in CURVES} | engine.diagnostics
    for (run, episode), values in reference.logged.items():
        for key, value in values.items():
            expected = pytest.approx(value.item(), rel=1e-3, abs=1e-5, nan_ok=True)
            assert found[key][run, episode].item() == expected, key
    learned = build()
    engine.write_strategy(learned)
    for key, value in strategy.state_dict().items():
        _, place, name = key.split(".", 2)
        if name == "frames" and not isinstance(strategy.strategies[int(place)], LinearEpsilon):
            continue  # Counted for a warning of the module's alone.
        torch.testing.assert_close(learned.state_dict()[key], value, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(DOMAINS))
def test_greedy_episodes_are_those_of_the_tensor_functions(name, random):
    tests, max_steps, gamma = 200, 60, 0.9
    env = DOMAINS[name]()
    policy = torch.randint(env.num_actions, (env.num_states,), generator=random)
    uniforms = double(tests, 4 + max_steps, random=random)
    noisy = env.scalars().noisy()
    rule = Rule(1, tests, max_steps, gamma, 0.5, 1.0, 0.0, False, True, 0, noisy, 0, 0, 0, 0.0)
    length, score, perfect = called(greedy_episodes)(
        env.scalars(),
        rule,
        policy.numpy().astype(np.int16),
        np.uint64(0),
        _scratch(tests, np.float64),
        uniforms.numpy(),
        0,
    )
    zeros = torch.zeros(tests, dtype=torch.int64)
    physics = torch.zeros(tests, 4, dtype=torch.float64)
    reference = Reference(name, {"table": zeros, "state": zeros, "physics": physics})
    reference.physics, reference.state = reference.start(uniforms[:, :4])
    alive, steps, returns = torch.ones(tests, dtype=torch.bool), zeros.clone(), torch.zeros(tests)
    for t in range(max_steps):
        uniform = uniforms[:, 4 + t].contiguous()
        after, reward, terminated = reference.move(policy[reference.state], uniform)
        reference.state, steps = after, steps + alive
        returns = returns + gamma**t * reward * alive
        alive = alive & ~terminated
    assert length == pytest.approx(steps.double().mean().item())
    assert score == pytest.approx(returns.double().mean().item(), rel=1e-5)
    assert perfect == bool((steps == max_steps).all())
