"""A bank of strategies that do not act shows what each would have shown."""

import pytest
import torch
from contracts import FACTORIES, LEARNING, RUNS, memory, recorded, transitions
from tensordict import TensorDict

from bmc_torchrl import ApexEpsilon, BMCEpsilon, ConstantEpsilon, GaussianLikelihood, what_if
from bmc_torchrl.strategies import StrategyBank
from bmc_torchrl.strategies import bmc as bmc_module

NAMES = [name for name in FACTORIES if name not in ("stacked", "apex")]
PRIORS = (1.0, 10.0, 100.0)


def everyone():
    """Every strategy, and several of some, by label."""
    priors = {f"alpha0_{x:g}": BMCEpsilon(x, x + 0.01) for x in PRIORS}
    likelihoods = {
        f"variance_{x:g}": BMCEpsilon(likelihood=GaussianLikelihood(x)) for x in (1.0, 4.0)
    }
    return {**{name: FACTORIES[name](()) for name in NAMES}, **priors, **likelihoods}


@pytest.mark.parametrize("timed", [False, True], ids=["no names", "time"])
@pytest.mark.parametrize("shape", [(), RUNS])
def test_each_is_what_it_would_be_alone(shape, timed):
    bank = StrategyBank(everyone(), shape)
    data = transitions((*shape, 40))
    taken = torch.rand(data.shape) < 0.8
    data["collector"] = TensorDict({"mask": torch.rand(data.shape) < 0.9}, data.shape)
    if timed:
        data.names = [*[None] * len(shape), "time"]
    bank.update(data, taken)
    found = bank.epsilons()
    assert list(found) == list(everyone())
    for label, strategy in everyone().items():
        for run in range(shape[0] if shape else 1):
            alone = FACTORIES[label](()) if label in NAMES else everyone()[label]
            part = data[run] if shape else data
            alone.update(part, taken[run] if shape else taken)
            shown = found[label][run] if shape else found[label]
            torch.testing.assert_close(shown, alone.eps, rtol=1e-12, atol=0)
        if label in LEARNING:
            assert not torch.equal(found[label], strategy.eps.expand(found[label].shape))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shape", [(), RUNS])
def test_steps_that_wait_are_learned_when_epsilon_is_asked_for(shape, masked):
    told, updated = StrategyBank(everyone(), shape), StrategyBank(everyone(), shape)
    steps = StrategyBank.MOST_WAITING + 20
    data = transitions((*RUNS, steps))
    for step in range(steps):
        now = data[..., step].clone()
        if masked and step >= 10:
            now["collector"] = TensorDict({"mask": torch.rand(RUNS) < 0.5}, RUNS)
        told.tell(now)
        updated.update(now)
        now.zero_()
        if step == 30:
            for label, epsilon in updated.epsilons().items():
                torch.testing.assert_close(told.epsilons()[label], epsilon, rtol=1e-12, atol=0)
    expected = updated.state_dict()
    for name, value in told.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-12, atol=0)


def test_steps_that_wait_are_learned_in_one_update(monkeypatch):
    bank, updates = StrategyBank({"bmc": BMCEpsilon()}), []
    update = StrategyBank.update
    monkeypatch.setattr(
        StrategyBank, "update", lambda self, t: (updates.append(t.shape), update(self, t))[1]
    )
    for _ in range(bank.MOST_WAITING + 3):
        bank.tell(transitions(RUNS))
    assert updates == [(4 * bank.MOST_WAITING,)]
    bank.epsilons()
    assert updates[1:] == [(4 * 3,)]


def test_a_bank_that_is_loaded_forgets_what_it_was_told():
    bank = StrategyBank({"bmc": BMCEpsilon()})
    before = {name: value.clone() for name, value in bank.state_dict().items()}
    bank.tell(transitions(RUNS))
    bank.load_state_dict(before)
    assert all(torch.equal(value, before[name]) for name, value in bank.state_dict().items())


def test_environments_that_share_an_epsilon_share_it_in_the_bank():
    data = transitions((3, 20))
    pooled, bank = BMCEpsilon(), StrategyBank({"bmc": BMCEpsilon()})
    pooled.update(data)
    bank.update(data)
    assert float(bank.epsilons()["bmc"]) == pytest.approx(float(pooled.eps), rel=1e-12)


def test_priors_and_fixed_variances_are_learned_in_one_update_each(monkeypatch):
    learned = []
    learn = bmc_module.BMCEpsilon.learn
    monkeypatch.setattr(
        bmc_module.BMCEpsilon,
        "learn",
        lambda self, *columns: (learned.append(self.batch_shape), learn(self, *columns))[1],
    )
    priors = {f"alpha0_{x:g}": BMCEpsilon(x, x + 0.01) for x in PRIORS}
    gaussian = {str(x): BMCEpsilon(likelihood=GaussianLikelihood(x)) for x in (1.0, 4.0)}
    StrategyBank({**priors, **gaussian}, RUNS).update(transitions(RUNS))
    assert learned == [(3 * 4,), (2 * 4,)]


@pytest.mark.parametrize("shape", [(), RUNS])
def test_a_table_has_the_epsilon_after_each_transition(shape):
    strategies, data = {"bmc": BMCEpsilon(), "ε": ConstantEpsilon(0.3)}, transitions((*shape, 11))
    before = memory(strategies["bmc"])
    table = what_if(data, strategies, batch_shape=shape, every=4)
    assert table["step"].tolist() == [0, 4, 8, 11]
    alone = BMCEpsilon(batch_shape=shape)
    for row, step in enumerate(table["step"].tolist()):
        if row:
            alone.update(data[..., table["step"][row - 1] : step])
        torch.testing.assert_close(table["bmc"][row], alone.eps, rtol=1e-12, atol=0)
    assert (table["ε"] == 0.3).all()
    assert all(torch.equal(value, before[key]) for key, value in memory(strategies["bmc"]).items())


def test_what_the_policy_did_not_take_teaches_nothing():
    data = transitions((30,))
    data["epsilon"] = recorded(torch.arange(30) >= 10)
    table = what_if(data, {"bmc": BMCEpsilon()})["bmc"]
    assert (table[:11] == table[0]).all()
    assert table[-1] < table[0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: StrategyBank({}), "at least one"),
        (lambda: StrategyBank({"a": BMCEpsilon(batch_shape=[2])}), r"'a' has batch_shape=\[2\]"),
        (lambda: StrategyBank({"a": BMCEpsilon()}, [2, 2]), r"\(\) or \[runs\]"),
        (lambda: StrategyBank({"a": ApexEpsilon()}, [2]), "ApexEpsilon does not follow"),
        (lambda: what_if(transitions((3,)), {"a": BMCEpsilon()}, every=0), "every must be"),
        (lambda: what_if(transitions(()), {"a": BMCEpsilon()}), "need a dimension of time"),
    ],
)
def test_what_cannot_be_a_bank_says_why(call, message):
    with pytest.raises(ValueError, match=message):
        call()
