"""The lockstep engine takes the steps that the library modules take."""

from __future__ import annotations

import functools
import itertools
import re

import pytest
import torch
from lockstep_reference import (
    DOMAINS,
    RUNS,
    STRATEGIES,
    compare_dqn,
    compare_tabular,
    make_tabular,
)
from torch._inductor.utils import run_and_get_code

from bmc_torchrl.envs.factored import active_features, one_hot_encoding
from bmc_torchrl.learners.published_fit import adam_state, fit_minibatch
from bmc_torchrl.learners.replay import distinct_indices
from bmc_torchrl.learners.values import QNetwork
from bmc_torchrl.lockstep.flat_network import FlatNetwork, Minibatch, adam_rates, fit
from bmc_torchrl.lockstep.replay_rows import sampled_rows


@pytest.mark.parametrize(("domain", "strategy"), list(itertools.product(DOMAINS, STRATEGIES)))
def test_dqn_follows_the_library_modules(domain: str, strategy: str) -> None:
    compare_dqn(domain, strategy, steps=40)


@pytest.mark.parametrize("next_action", ["before", "after"])
@pytest.mark.parametrize(("domain", "strategy"), list(itertools.product(DOMAINS, STRATEGIES)))
def test_expected_sarsa_follows_the_library_modules(
    domain: str, strategy: str, next_action: str
) -> None:
    compare_tabular(domain, strategy, steps=40, next_action=next_action)


def test_sampled_rows_are_those_of_the_replay_sampler() -> None:
    uniform, filled = torch.rand(5, 7, 6, dtype=torch.float64), torch.arange(6, 11)
    expected = [distinct_indices(u, int(n)) for u, n in zip(uniform, filled, strict=True)]
    assert torch.equal(sampled_rows(uniform, filled), torch.stack(expected))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
@pytest.mark.parametrize("domain", ["grid"])
def test_compiled_dqn_follows_the_library_modules(domain: str) -> None:
    compare_dqn(domain, "stacked", steps=30, compiled=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
@pytest.mark.parametrize("domain", ["supply"])
def test_compiled_expected_sarsa_follows_the_library_modules(domain: str) -> None:
    compare_tabular(domain, "stacked", steps=30, compiled=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")
@pytest.mark.parametrize(
    ("domain", "strategy", "next_action"),
    [("grid", "bmc", "before"), ("grid", "wins", "after"), ("supply", "stacked", "before")],
)
def test_compiled_steps_copy_no_tables(domain: str, strategy: str, next_action: str) -> None:
    engine = make_tabular(domain, strategy, next_action=next_action, compiled=True)
    with torch._inductor.config.patch(force_disable_caches=True):
        _, codes = run_and_get_code(engine.advance, 8)
    made = re.findall(r"empty_strided_cpu\(\(([\d, ]+)\)", "".join(codes))
    shapes = {tuple(int(size) for size in re.findall(r"\d+", shape)) for shape in made}
    assert (RUNS, engine.domain.num_actions) in shapes
    assert not shapes & {tuple(engine.table.shape), tuple(engine.greedy.shape)}


@pytest.mark.parametrize(("embedded", "actions"), [(False, 3), (True, 3), (True, 40)])
@pytest.mark.parametrize("l2", [0.0, 0.01])
def test_the_flat_fit_is_the_published_fit(embedded: bool, actions: int, l2: float) -> None:
    runs, count, sizes = 3, 5, (4, 6)
    network = QNetwork(10, actions, hidden=(7, 6), runs=runs, dtype=torch.float64)
    flat = FlatNetwork((10, 7, 6, actions), embedded)
    start = flat.pack(network)
    state = torch.randint(24, (runs, 2 * count + 1))
    positions = active_features(state, sizes).mT
    dense = one_hot_encoding(state, sizes).double()
    action, reward = torch.randint(actions, (runs, count)), torch.randn(runs, count).double()
    done = torch.rand(runs, count) < 0.3
    inputs = positions if embedded else dense.mT
    batch = Minibatch(inputs[..., :-1], dense[:, :count].mT, action, reward, done)
    rates = torch.tensor(adam_rates(0.01, 1, 4), dtype=torch.float64).view(-1, 1, 1)
    moments = torch.zeros_like(start), torch.zeros_like(start)
    (ours, *_), extra, _ = fit(
        flat,
        (start, *moments),
        batch,
        rates.expand(-1, runs, 1),
        gamma=0.9,
        l2=l2,
        extra=inputs[..., -1:],
    )
    parameters = {name: p.detach() for name, p in network.named_parameters()}
    call = functools.partial(torch.func.functional_call, network)
    torch.testing.assert_close(extra.mT, call(parameters, dense[:, -1:]))
    following = call(parameters, dense[:, count : 2 * count]).amax(-1)
    target = reward + 0.9 * torch.where(done, 0.0, following)
    fit_minibatch(
        call,
        parameters,
        adam_state(parameters),
        dense[:, :count],
        action,
        target,
        epochs=4,
        learning_rate=0.01,
        l2=l2,
    )
    torch.testing.assert_close(ours, flat.pack(network), rtol=1e-7, atol=1e-9)
