import gymnasium
import pytest
import torch

from bmc_torchrl import BMCEpsilon, ConstantEpsilon, VDBEEpsilon
from bmc_torchrl.lockstep.single import SingleDQN


def _agent(strategy=None, **options):
    options = {"seed": 3, "compiled": False, "learning_starts": 16, "batch_size": 16, **options}
    strategy = strategy or BMCEpsilon(batch_shape=[1])
    return SingleDQN(gymnasium.make("CartPole-v1"), strategy, hidden=(8, 8), **options)


def test_the_step_is_adam_on_the_huber_loss_with_a_target_network():
    agent = _agent(target_interval=10**6, learning_rate=1e-2)
    agent.advance(20)
    seen = []
    agent._call = lambda draws: seen.append(draws)
    agent.advance(1)
    before, target = agent.flat.clone().requires_grad_(), agent.target.clone()
    moments, network = (agent.mean.clone(), agent.square.clone()), agent.network
    agent._step(seen[0])
    rows = agent.replay[(seen[0][2:] * 21).long()]
    state, after, action, reward, terminated = rows.split([4, 4, 1, 1, 1], 1)
    value = network.forward(before, state.T.unsqueeze(0))[-1][0].T.gather(1, action.long())
    bootstrap = network.forward(target, after.T.unsqueeze(0))[-1][0].amax(0).unsqueeze(1)
    goal = reward + 0.99 * (1 - terminated) * bootstrap
    loss = torch.nn.functional.smooth_l1_loss(value, goal.detach())
    (gradient,) = torch.autograd.grad(loss, before)
    step = 21 - 16 + 1
    mean = 0.9 * moments[0] + 0.1 * gradient
    square = 0.999 * moments[1] + 0.001 * gradient**2
    rate = 1e-2 * (1 - 0.999**step) ** 0.5 / (1 - 0.9**step)
    expected = before.detach() - rate * mean / (square.sqrt() + 1e-7)
    torch.testing.assert_close(agent.flat, expected, rtol=1e-5, atol=1e-6)


def test_nothing_is_learned_before_the_start_and_the_target_follows_at_its_interval():
    agent = _agent(target_interval=30)
    start = agent.flat.clone()
    agent.advance(15)
    assert agent.flat.equal(start)
    agent.advance(14)
    assert not agent.flat.equal(start)
    assert agent.target.equal(start)
    agent.advance(1)
    assert agent.target.equal(agent.flat)


def test_the_strategy_sees_every_transition_and_decides_the_action():
    agent = _agent(BMCEpsilon(batch_shape=[1]))
    agent.advance(40)
    assert agent.strategy.return_count.item() == 40
    greedy = _agent(ConstantEpsilon(0.0, batch_shape=[1]))
    for _ in range(20):
        greedy.advance(1)
        value = greedy.network.forward(greedy.flat, greedy.observation.view(1, 4, 1))[-1]
        assert greedy.action.item() == value.argmax().item()


def test_episodes_are_counted_once():
    agent = _agent()
    agent.advance(300)
    assert sum(agent.returns) + agent._return == agent.steps == 300


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
def test_compiled_and_eager_steps_are_the_same_run():
    agents = [_agent(compiled=compiled) for compiled in (False, True)]
    for agent in agents:
        agent.advance(60)
    assert agents[0].returns == agents[1].returns
    torch.testing.assert_close(agents[0].flat, agents[1].flat, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(agents[0].strategy.eps, agents[1].strategy.eps)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (BMCEpsilon(), "batch_shape"),
        (BMCEpsilon(num_states=3, batch_shape=[1]), "num_states"),
        (VDBEEpsilon(num_states=3, sigma=1.0, delta=0.5, batch_shape=[1]), "num_states"),
    ],
)
def test_a_strategy_that_cannot_serve_one_run_is_refused(strategy, message):
    with pytest.raises(ValueError, match=message):
        _agent(strategy)
