"""ε-BMC is built by TorchRL's trainer configs."""

import importlib
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.utils import instantiate
from torchrl.data import Categorical, Composite
from torchrl.modules import EGreedyModule

from bmc_torchrl import AdaptiveEGreedyModule, BMCEpsilon
from bmc_torchrl.interop.trainer_hook import UpdateEpsilon

EXAMPLES = Path(__file__).parents[2] / "scripts/examples"

pytestmark = pytest.mark.filterwarnings(
    # Of TorchRL about itself.
    "ignore:DQNTrainer is an experimental:UserWarning",
    "ignore:The '.*' hook stage will be replaced:FutureWarning",
)

# Importing them registers TorchRL's nodes for the whole process, where one named as a config of
# ours, logger/csv, makes Hydra warn.
REPO = ConfigStore.instance().repo
BEFORE = set(REPO)
importlib.import_module("torchrl.trainers.algorithms.configs")
NODES = {name: REPO.pop(name) for name in set(REPO) - BEFORE}


@pytest.fixture(autouse=True)
def torchrls_nodes(monkeypatch):
    for name, node in NODES.items():
        monkeypatch.setitem(REPO, name, node)


def composed(*overrides: str):
    with initialize_config_dir(str(EXAMPLES), version_base="1.3"):
        return compose("trainer_config", overrides=list(overrides))


def test_the_module_is_a_node_where_torchrl_wants_a_partial():
    # TorchRL's maker of the trainer calls it with these two keywords.
    spec = Composite({"action": Categorical(2)})
    explore = instantiate(composed().trainer.greedy_module)(spec=spec, action_key="action")
    assert isinstance(explore, AdaptiveEGreedyModule)
    assert isinstance(explore.strategy, BMCEpsilon)
    assert float(explore.eps) == pytest.approx(1 / 2.01)


def test_every_strategy_parameter_is_an_override():
    node = composed("trainer.greedy_module.strategy.beta0=3.0").trainer.greedy_module
    assert float(instantiate(node)(spec=Categorical(2)).eps) == 0.25


@pytest.mark.slow
def test_torchrls_nodes_and_ours_make_a_trainer_that_learns_about_epsilon():
    import trainer_config

    trainer = trainer_config.train(composed("frames=400"))
    explore = trainer.greedy_module
    assert float(explore.strategy.return_count) == 400
    assert 0 < float(explore.eps) < 1 / 2.01
    hook = trainer._modules["update_epsilon"]
    trained = trainer.loss_module.value_network_params.flatten_keys(".")
    weights = dict(hook.returns.q_actor.named_parameters())
    for name, value in weights.items():
        torch.testing.assert_close(value.data, trained[name].data)


def test_without_the_module_the_hook_says_what_it_needs():
    class Plain:
        greedy_module = EGreedyModule(Categorical(2))

    with pytest.raises(TypeError, match="greedy_module=AdaptiveEGreedyModule"):
        UpdateEpsilon(gamma=0.9).register(Plain())
