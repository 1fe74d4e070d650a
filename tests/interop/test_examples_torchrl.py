"""ε-BMC composes with TorchRL's algorithms: each example is imported, run small, and checked."""

import re
import runpy
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from bmc_torchrl import BMCEpsilon, OneStepReturns

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.filterwarnings(
    # Of TorchRL about itself.
    "ignore:DQNTrainer is an experimental:UserWarning",
    "ignore:The '.*' hook stage will be replaced:FutureWarning",
    "ignore:PettingZoo in TorchRL is tested:UserWarning",
)


INSTALL = "pip install -c constraints.txt '.[examples]'"
needs_mpe2 = pytest.mark.skipif(not find_spec("mpe2"), reason=INSTALL)
needs_toy_text = pytest.mark.skipif(not find_spec("pygame"), reason=INSTALL)


def never_rises(epsilon: list[float]) -> bool:
    """Theorem 1 of the paper, for a prior with ε below ½."""
    return all(after <= before for before, after in pairwise(epsilon))


def applied(diff: str, source: str) -> str:
    """A script with the README's diff applied: each line that goes must be there, once."""
    lines = source.splitlines()
    position, indent = 0, ""
    for mark, line in re.findall(r"^([-+ ]) (.*)$", diff, re.MULTILINE):
        if mark == "+":
            lines.insert(position, indent + line.strip())
            position += 1
            continue
        (position,) = (i for i, found in enumerate(lines) if found.strip() == line.strip())
        indent = lines[position][: -len(lines[position].lstrip())]
        if mark == "-":
            del lines[position]
        else:
            position += 1
    return "\n".join(lines)


@pytest.mark.slow
def test_the_readmes_diff_applied_to_a_plain_torchrl_dqn_makes_epsilon_adapt(tmp_path):
    plain = (ROOT / "scripts/examples/reference_dqn.py").read_text()
    (diff,) = re.findall(r"```diff\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    imports = (
        "from bmc_torchrl import AdaptiveEGreedyModule, BMCEpsilon, OneStepReturns\nimport sys"
    )
    changed = applied(diff, plain).replace("import sys", imports)
    scripts = {"plain": plain, "changed": changed}
    epsilon = {}
    for name, script in scripts.items():
        (tmp_path / f"{name}.py").write_text(script)
        epsilon[name] = runpy.run_path(str(tmp_path / f"{name}.py"))["main"](1000)
    assert epsilon["plain"] == pytest.approx([1 - 0.95 * i / 500 for i in range(1, 11)], abs=1e-4)
    assert never_rises([1 / 2.01, *epsilon["changed"]])
    assert epsilon["changed"][-1] < 0.49
    assert len(changed.splitlines()) == len(plain.splitlines()) + 2


@pytest.mark.slow
def test_dqn_trainer_steps_the_module_and_its_hook_updates_it():
    import dqn_trainer

    trainer = dqn_trainer.main(1000)
    explore = trainer.greedy_module
    assert float(explore.strategy.return_count) == 1000
    assert 0 < float(explore.eps) < 0.49
    saved = trainer._modules["update_epsilon"].state_dict()
    torch.testing.assert_close(saved["explore"]["strategy.alpha"], explore.strategy.alpha)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["double", "dueling", "n_step", "prioritized", "c51", "noisy"])
def test_epsilon_adapts_in_every_variant_of_dqn(name):
    import variants

    epsilon, greedy = variants.main(name, 3200)
    assert never_rises([1 / 2.01, *epsilon])
    assert epsilon[-1] < 0.495
    value = greedy["greedy_return"]
    # A pole that never falls is worth 1 / (1 − 0.95).
    assert 5 < float(value.mean()) < 20
    assert (value >= greedy["uniform_return"]).all()


def test_n_step_data_are_stored_while_epsilon_learns_from_single_steps():
    import variants

    env = variants.CartPoleEnv(batch_size=[2], observation="encoded")
    q_actor, _, options = variants.n_step(3)
    data = env.rollout(5, q_actor)
    stored = options["store"](data)
    assert stored["steps_to_next_obs"].flatten().tolist() == [3, 3, 3, 2, 1] * 2
    assert "steps_to_next_obs" not in data
    assert (data["next", "reward"] == 1).all()


@pytest.mark.slow
def test_a_recurrent_network_values_the_next_state_with_the_memory_of_the_episode():
    import recurrent_dqn

    epsilon, _ = recurrent_dqn.main(1280)
    assert never_rises([1 / 2.01, *epsilon])
    assert epsilon[-1] < 0.4975
    env, q_actor = recurrent_dqn.build(copies=2)
    data = env.rollout(8, q_actor, break_when_any_done=False)
    returns = OneStepReturns(q_actor, gamma=0.95)(data.clone())
    # What the policy itself thought of s′ when it got there.
    arrived = data["action_value"][:, 1:].amax(-1)
    expected = (data["next", "reward"].squeeze(-1)[:, :-1] + 0.95 * arrived)[:, :7]
    torch.testing.assert_close(returns["greedy_return"][:, :-1], expected)
    data["next", "recurrent_state"].zero_()
    forgetful = OneStepReturns(q_actor, gamma=0.95)(data)["greedy_return"]
    assert not torch.isclose(forgetful[:, 2:-1], expected[:, 2:]).any()


def test_replayed_sequences_keep_episodes_apart_in_the_next_states_too():
    import recurrent_dqn

    env, q_actor = recurrent_dqn.build(copies=2)
    data = env.rollout(60, break_when_any_done=False, auto_reset=True)
    starts = data["is_init"].squeeze(-1)[0].nonzero().flatten().tolist()
    start = starts[1]
    after = recurrent_dqn.sequences(data)["next"]
    other = after.clone()
    other["observation"][0, :start] += 1.0
    with recurrent_dqn.set_recurrent_mode(True), torch.no_grad():
        value, changed = q_actor(after)["action_value"][0], q_actor(other)["action_value"][0]
    torch.testing.assert_close(value[start:], changed[start:])
    assert not torch.isclose(value[:start], changed[:start]).all()


@pytest.mark.slow
@needs_toy_text
def test_taxi_never_does_what_its_mask_forbids_and_uniform_means_legal():
    import taxi_mask

    batches = taxi_mask.main(960)
    data = torch.cat(batches)
    legal = data["action_mask"].gather(-1, data["action"].unsqueeze(-1))
    assert legal.all()
    assert not data["action_mask"].all()
    # Only an illegal pick-up or drop-off costs 10.
    assert data["next", "reward"].min() == -1
    first = batches[0]
    assert (first["uniform_return"] == -1).all()
    table, gamma = torch.randn(500, 6), 0.95
    q_actor = taxi_mask.QValueActor(
        taxi_mask.nn.Embedding.from_pretrained(table),
        in_keys=["observation"],
        action_space="categorical",
        action_mask_key="action_mask",
    )
    OneStepReturns(q_actor, gamma=gamma)(first)
    for row in first:
        value = table[row["next", "observation"]][row["next", "action_mask"]]
        alive = 1 - row["next", "terminated"].float()
        torch.testing.assert_close(row["uniform_return"], (-1 + alive * gamma * value.mean())[0])
        torch.testing.assert_close(row["greedy_return"], (-1 + alive * gamma * value.max())[0])


@pytest.mark.slow
def test_tic_tac_toe_plays_legal_moves_and_learns_to_win():
    import tic_tac_toe

    batches, share = tic_tac_toe.main(1600)
    data = torch.cat(batches)
    explored = data["action"] != data["action_value"].argmax(-1)
    assert explored.any()
    assert data["mask"].gather(-1, data["action"].unsqueeze(-1)).all()
    assert never_rises([float(batch["epsilon"][-1]) for batch in batches])
    # A random first player wins 58.5 % of its games.
    assert share > 0.7


@pytest.mark.slow
def test_each_of_several_action_variables_adds_its_own_value():
    import two_dials

    epsilon, greedy = two_dials.main(3200)
    assert never_rises([1 / 2.01, *epsilon])
    assert epsilon[-1] < 0.05
    assert (greedy["next", "reward"] == 2).all()
    torch.testing.assert_close(
        greedy["greedy_return"], torch.full_like(greedy["greedy_return"], 4.0), atol=0.05, rtol=0
    )
    # Uniform dials are right with probability 1/3 and 1/4, and then all goes on as before.
    expected = 2 + 0.5 * (1 / 3 + 1 / 4 + 0.5 * 4)
    assert float(greedy["uniform_return"].mean()) == pytest.approx(expected, abs=0.05)


@pytest.mark.slow
@needs_mpe2
@pytest.mark.parametrize(("mixer", "per_agent"), [("vdn", True), ("qmix", False)])
def test_agents_have_a_posterior_each_or_pool_their_evidence(mixer, per_agent):
    import simple_spread

    explore, batches = simple_spread.main(mixer, 480, per_agent=per_agent)
    strategy = explore.strategy
    assert strategy.return_count.sum() == 480 * 3
    assert strategy.alpha.shape == ((3,) if per_agent else ())
    assert (explore.eps < 1 / 2.01).all()
    assert len(set(explore.eps.reshape(-1).tolist())) == (3 if per_agent else 1)
    again = BMCEpsilon(alpha0=1.0, beta0=1.01, batch_shape=strategy.batch_shape)
    for data in batches:
        recorded = data["agent", "epsilon"]
        assert recorded.shape == (160, 3)
        torch.testing.assert_close(recorded, again.eps.float().expand(160, 3))
        again.update(data)
    torch.testing.assert_close(again.alpha, strategy.alpha)
