"""What TorchRL's own tests ask of ``EGreedyModule``, asked of ours, for discrete actions."""

import pytest
import torch
from contracts import ACTIONS
from tensordict import TensorDict
from tensordict.nn import TensorDictSequential
from torchrl.data import Binary, Categorical, Composite, MultiCategorical, MultiOneHot, OneHot
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import EGreedyModule, QValueActor

from bmc_torchrl import AdaptiveEGreedyModule, LinearEpsilon

BATCH = (3, 4, 2)
SPECS = {"categorical": Categorical(ACTIONS), "one_hot": OneHot(ACTIONS)}
each_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
each_rate = pytest.mark.parametrize("eps", [0.0, 0.5, 1.0])


class Shim(AdaptiveEGreedyModule):
    """Our module behind the constructor of theirs."""

    def __init__(
        self,
        spec,
        eps_init=1.0,
        eps_end=0.1,
        annealing_num_steps=1000,
        *,
        action_key="action",
        action_mask_key=None,
        device=None,
    ):
        strategy = LinearEpsilon(eps_init, eps_end, annealing_num_steps, count_by="step")
        keys = {"action_key": action_key, "action_mask_key": action_mask_key}
        super().__init__(spec, strategy, device=device, **keys)


each_module = pytest.mark.parametrize("make", [EGreedyModule, Shim], ids=["theirs", "ours"])


def q_actor(spec, **options):
    """All values are zero, so that the greedy action is the first legal one."""
    network = torch.nn.Linear(ACTIONS, ACTIONS, bias=False)
    return QValueActor(network, in_keys=["observation"], spec=spec, **options)


def seen(mask=None):
    td = TensorDict({"observation": torch.zeros(*BATCH, ACTIONS)}, BATCH)
    return td if mask is None else td.set("action_mask", mask)


def index(action, spec):
    return action.int().argmax(-1) if isinstance(spec, OneHot) else action


def legal_somewhere():
    mask = torch.rand(*BATCH, ACTIONS) < 0.5
    mask[..., 1] |= ~mask.any(-1)
    return mask


@each_module
@each_spec
@each_rate
def test_actions_are_greedy_random_or_a_mixture(make, spec, eps):
    explore = make(spec=spec, eps_init=eps, eps_end=eps)
    policy = TensorDictSequential(q_actor(spec), explore)
    greedy = index(q_actor(spec)(seen())["action"], spec)
    drawn = torch.stack([index(policy(seen())["action"], spec) for _ in range(50)])
    differs = (drawn != greedy).float().mean()
    assert float(differs) == pytest.approx(eps * (ACTIONS - 1) / ACTIONS, abs=0.06)


@each_module
@each_spec
@each_rate
def test_masked_actions_are_never_taken(make, spec, eps):
    explore = make(spec=spec, eps_init=eps, eps_end=eps, action_mask_key="action_mask")
    policy = TensorDictSequential(q_actor(spec, action_mask_key="action_mask"), explore)
    everything = torch.ones(*BATCH, ACTIONS, dtype=torch.bool)
    for mask in (everything, *(legal_somewhere() for _ in range(20))):
        action = index(policy(seen(mask))["action"], spec)
        assert mask.gather(-1, action.unsqueeze(-1)).all()


@each_module
@each_spec
def test_a_missing_mask_is_a_key_error_that_names_it(make, spec):
    explore = make(spec=spec, action_mask_key="action_mask")
    for actor in (q_actor(spec, action_mask_key="action_mask"), q_actor(spec)):
        with pytest.raises(KeyError, match="action_mask"):
            TensorDictSequential(actor, explore)(seen())


@each_module
@each_spec
def test_a_missing_spec_is_a_runtime_error(make, spec):
    policy = TensorDictSequential(q_actor(spec), make(spec=None))
    with pytest.raises(RuntimeError, match=r"spec|Failed while executing module"):
        policy(seen())


@each_module
@pytest.mark.parametrize(
    ("spec", "size"),
    [
        (OneHot(ACTIONS), ACTIONS + 1),
        (MultiOneHot([2, 3]), 4),
        (MultiCategorical([2, 3]), 3),
        (Binary(3), 2),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_action_of_the_wrong_shape_is_a_value_error(make, spec, size):
    action = torch.zeros(10, size, dtype=spec.dtype)
    with pytest.raises(ValueError, match=r"shape"):
        make(spec=spec)(TensorDict({"action": action}, [10]))


@each_module
@each_spec
@pytest.mark.parametrize("composite", [False, True], ids=["leaf", "composite"])
def test_nested_actions_explore_per_element(make, spec, composite):
    agents, key = 5, ("agents", "action")
    leaf = spec.expand(2000, agents, *spec.shape)
    whole = Composite(agents=Composite(action=leaf, shape=[2000, agents]), shape=[2000])
    explore = make(whole if composite else leaf, 0.5, 0.5, action_key=key)
    greedy = torch.zeros_like(leaf.rand())
    acting = TensorDict({"action": greedy}, [2000, agents])
    td = explore(TensorDict({"agents": acting}, [2000]))
    kept = td[key] == greedy
    kept = kept.all(-1) if isinstance(spec, OneHot) else kept
    shares = kept.float().mean(0)
    drawn_greedy = 0 if isinstance(spec, OneHot) else 1 / ACTIONS
    expected = torch.full([agents], 0.5 + 0.5 * drawn_greedy)
    torch.testing.assert_close(shares, expected, rtol=0, atol=0.05)
    assert not torch.equal(kept[:, 0], kept[:, 1])
    assert explore.spec[key] == leaf


@each_spec
@pytest.mark.parametrize("frames", [1, 7, 100, 1000])
def test_epsilon_is_annealed_by_the_same_steps(spec, frames):
    theirs, ours = (make(spec, 0.9, 0.2, 100) for make in (EGreedyModule, Shim))
    assert float(ours.eps) == pytest.approx(float(theirs.eps))
    for _ in range(3):
        theirs.step(frames)
        ours.step(frames)
        assert float(ours.eps) == pytest.approx(float(theirs.eps), abs=1e-5)
    theirs.step()
    ours.step()
    assert float(ours.eps) == pytest.approx(float(theirs.eps), abs=1e-5)


@each_module
def test_epsilon_may_not_rise(make):
    with pytest.raises((RuntimeError, ValueError), match=r"decrease|not exceed"):
        make(Categorical(ACTIONS), eps_init=0.1, eps_end=0.5)


@each_module
@each_spec
def test_only_random_exploration_explores(make, spec):
    explore = make(spec, 1.0, 1.0)
    greedy = torch.zeros_like(spec.expand(100, *spec.shape).rand())
    for kind in (ExplorationType.MODE, ExplorationType.MEAN, ExplorationType.DETERMINISTIC):
        with set_exploration_type(kind):
            td = explore(TensorDict({"action": greedy}, [100]))
        assert torch.equal(td["action"], greedy)
    with set_exploration_type(ExplorationType.RANDOM):
        td = explore(TensorDict({"action": greedy}, [100]))
    assert not torch.equal(td["action"], greedy)


@each_module
@each_spec
def test_a_checkpoint_keeps_the_annealing(make, spec):
    explore, loaded = make(spec, 0.9, 0.2, 100), make(spec, 0.9, 0.2, 100)
    explore.step(30)
    loaded.load_state_dict(explore.state_dict())
    assert float(loaded.eps) == float(explore.eps) < 0.9


@each_module
def test_keys_are_those_of_the_constructor(make):
    explore = make(Categorical(ACTIONS), action_key="chosen", action_mask_key="legal")
    assert explore.in_keys == ["chosen", "legal"]
    assert explore.out_keys[0] == "chosen"


@pytest.mark.parametrize("batch", [(), (64,), (5, 7)])
def test_the_same_seed_draws_the_very_actions_of_egreedy(batch):
    theirs, ours = EGreedyModule(Categorical(7), 0.4, 0.4), Shim(Categorical(7), 0.4, 0.4)
    for seed in range(20):
        acted = []
        for module in (theirs, ours):
            torch.manual_seed(seed)
            td = TensorDict({"action": torch.full(batch, 3)}, batch)
            acted.append([module(td.clone())["action"] for _ in range(3)])
        for mine, other in zip(*acted, strict=True):
            assert torch.equal(mine, other)
