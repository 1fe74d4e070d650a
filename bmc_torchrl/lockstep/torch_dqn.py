"""The published DQN for many runs at once (docs/protocol.md §4)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from bmc_torchrl.envs.base import BatchedEnv
from bmc_torchrl.envs.lanes import Noise
from bmc_torchrl.functional import epsilon_greedy_action, uniform_action, values_left
from bmc_torchrl.learners.settings import PublishedDQNSettings, RunSettings
from bmc_torchrl.learners.values import QNetwork
from bmc_torchrl.lockstep.compiling import CompiledOnce
from bmc_torchrl.lockstep.flat_network import (
    FlatNetwork,
    Minibatch,
    adam_rates,
    fit,
    network_widths,
)
from bmc_torchrl.lockstep.replay_rows import sampled_rows
from bmc_torchrl.lockstep.torch_engine import Lockstep
from bmc_torchrl.strategies import EpsilonStrategy

__all__ = ["DQNDraws", "DQNLockstep"]

EMBED_BEYOND = 32
"""Multi-hot inputs wider than this are summed rows; narrower ones are multiplied."""

SMALLEST_BLOCK = 6
"""Lanes below which halving a block saves nothing: what is left is the cost of a call."""

ADAM_SETTLES = 40_000
"""Steps of Adam after which the bias correction is 1, in float64 too."""


class DQNDraws(NamedTuple):
    """All uniforms of some vector steps, in the order in which the TorchRL path draws them.

    Attributes:
        act: coin and action, float32 ``[steps, 2, runs]``.
        noise: of the domain, ``[steps, runs, n]``.
        sample: of the replay sampler, float64 ``[steps, runs, batch]``.
    """

    act: Tensor
    noise: Noise
    sample: Tensor


class DQNLockstep(Lockstep):
    """DQN with experience replay and no target network, one network per lane.

    Lanes learn in blocks of equal size, one by default; blocks whose lanes have all finished are
    not computed, and lanes move between blocks so that this happens soon. The last
    block is halved whenever half of its lanes have finished, so that a few long runs do not keep
    the others' lanes computing.

    Args:
        env: see :class:`Lockstep`.
        strategy: see :class:`Lockstep`.
        run: see :class:`Lockstep`.
        learner: how the networks look and learn.
        network: initial weights to use instead, ``runs=[runs]``; :meth:`export` gives the trained
            ones.
        block: lanes learnt at once, where memory is short; the largest divisor of the runs up to
            it is taken.
        **options: see :class:`Lockstep`.

    >>> from bmc_torchrl.envs import SubgoalGridEnv
    >>> from bmc_torchrl.strategies import BMCEpsilon
    >>> engine = DQNLockstep(
    ...     SubgoalGridEnv(batch_size=[2], max_steps=10),
    ...     BMCEpsilon(batch_shape=[2]),
    ...     RunSettings(gamma=0.99, episodes=2),
    ...     PublishedDQNSettings(
    ...         hidden=(8,), learning_rate=0.001, batch_size=4, capacity=16, epochs=2
    ...     ),
    ...     compiled=False,
    ... )
    >>> engine.advance(30)
    >>> engine.finished, engine.steps.shape
    (True, torch.Size([2, 2]))
    """

    def __init__(
        self,
        env: BatchedEnv,
        strategy: EpsilonStrategy,
        run: RunSettings,
        learner: PublishedDQNSettings,
        *,
        network: QNetwork | None = None,
        block: int | None = None,
        **options: Any,
    ) -> None:
        if run.next_action != "after":
            raise ValueError(
                f"next_action={run.next_action!r} is for expected SARSA; DQN acts after learning."
            )
        super().__init__(env, strategy, run, **options)
        self.learner = learner
        most = min(block or self.runs, self.runs)
        self.block = max(d for d in range(1, most + 1) if self.runs % d == 0)
        self.needs_index = strategy.state_key is not None
        self.needs_change = "value_change" in strategy.in_keys
        self._make_networks(self._drawn_network() if network is None else network)
        self._make_tests(self.flat[0], unroll=2)
        self._interact = self._compile(self._interact_step, "interaction")
        self._learn = self._compile_learning()
        self._reflect = self._compile(self._reflect_step, "strategy")

    def _drawn_network(self) -> QNetwork:
        domain = self.domain
        with self._own_seed():
            return QNetwork(
                domain.num_features,
                domain.num_actions,
                self.learner.hidden,
                runs=self.runs,
                active_features=domain.ones or None,
                device=self.device,
            )

    def _compile_learning(self) -> CompiledOnce:
        return self._compile(self._learn_block, f"learning of {self.block} lanes")

    def _make_networks(self, network: QNetwork) -> None:
        domain = self.domain
        widths = network_widths(network)
        if network.state_value is not None or network.run_shape != (self.runs,):
            raise ValueError(f"network must have runs={self.runs} and no dueling head.")
        if (widths[0], widths[-1]) != (domain.num_features, domain.num_actions):
            raise ValueError(
                f"network maps {widths[0]} features to {widths[-1]} actions, but the domain has "
                f"{domain.num_features} and {domain.num_actions}."
            )
        self.network = FlatNetwork(widths, bool(domain.ones) and widths[0] > EMBED_BEYOND)
        self.flat = self.network.pack(network).to(self.device)
        self.mean, self.square = torch.zeros_like(self.flat), torch.zeros_like(self.flat)
        self.snapshot = self.flat.clone()
        width = 2 * domain.record_width + 3
        self.replay = torch.zeros(self.runs, self.learner.capacity, width, device=self.device)
        self.lanes = torch.arange(self.runs, device=self.device)
        self.blocks = self.runs // self.block
        rates = adam_rates(self.learner.learning_rate, 1, ADAM_SETTLES)
        self.rates = torch.tensor(rates, dtype=torch.float32).to(self.device)
        self.value = self.network.forward(self.flat, self._inputs(self.state.unsqueeze(1)))[-1]
        self.value = self.value.squeeze(-1).contiguous()
        self.learned = torch.zeros(self.runs, 2 * domain.num_actions + 2, device=self.device)

    def _inputs(self, state: Tensor) -> Tensor:
        if self.network.embedded:
            return self.domain.positions(state)
        return self.domain.encode(state)

    def draw(self, steps: int) -> DQNDraws:
        """Fresh uniforms of `steps` vector steps."""
        options: dict[str, Any] = {"device": self.device, "generator": self.generator}
        act = torch.rand(steps, 2, self.runs, **options)
        noise = self.domain.draw([steps, self.runs], self.generator)
        shape = (steps, self.runs, self.learner.batch_size)
        sample = torch.rand(shape, dtype=torch.float64, **options)
        return DQNDraws(act, noise, sample)

    def _chunk(self, steps: int) -> None:
        self.vector_steps(self.draw(steps), self.time)

    def vector_steps(self, draws: DQNDraws, time: int) -> None:
        """Step every lane as often as there are draws: act, learn, update the strategy.

        Args:
            draws: the uniforms, each with a leading dimension of steps.
            time: number of vector steps taken before.
        """
        steps, learner = len(draws.act), self.learner
        batch, epochs = learner.batch_size, learner.epochs
        clock = torch.arange(time + 1, time + 1 + steps, device=self.device)
        filled = clock.clamp(max=learner.capacity)
        rows = sampled_rows(draws.sample, filled)
        noise = self.domain.transition_noise(draws.noise.transition)
        first = (clock - batch).clamp(min=0).unsqueeze(-1) * epochs
        number = first + torch.arange(epochs, device=self.device)
        rates_now = self.rates[number.clamp(max=ADAM_SETTLES - 1)]
        for i in range(steps):
            index, epsilon, seen, *states = self._interact(
                draws.act[i], noise[i], draws.noise.reset[i]
            )
            if time + i + 1 == batch:
                self.mean.zero_()
                self.square.zero_()
            learning = (self.episodes_done < self.episodes) & (filled[i] >= batch)
            position = (time + i) % learner.capacity
            self._learn_blocks(position, seen, learning, rows[i], rates_now[i], *states)
            ends = self._reflect(index, epsilon, seen)
            self.state.copy_(states[-1])
            self._keep(ends)

    def _learn_blocks(self, position: int, seen: Tensor, *rest: Tensor) -> None:
        learning, rows, rates, *states = rest
        for number in range(self.blocks):
            own = slice(number * self.block, (number + 1) * self.block)
            lanes = self.lanes[own]
            self.replay[own, position] = seen[lanes]
            learned = self._learn(
                *(x[own] for x in (self.flat, self.mean, self.square, self.replay)),
                *(x[lanes] for x in (*states, self.value, seen, learning, rows)),
                rates,
            )
            self.learned.index_copy_(0, lanes, learned)

    def _interact_step(self, act: Tensor, noise: Tensor, reset: Tensor) -> tuple[Any, ...]:
        """Steps 0 and 1: the transition as replay keeps it, and the states around it."""
        domain, before = self.domain, self.state
        index = domain.index(before) if self.needs_index else None
        epsilon = self._current_epsilon(index)
        random = uniform_action(act[1], domain.num_actions)
        action = epsilon_greedy_action(self.value.argmax(-1), epsilon, act[0], random)
        after, reward, terminated = domain.step(before, action, noise)
        done = terminated | (self.step_count + 1 >= domain.max_steps)
        flags = (done.float() + terminated.float()).unsqueeze(-1)
        columns = [domain.record(before), domain.record(after), reward.unsqueeze(-1)]
        seen = torch.cat([*columns, action.unsqueeze(-1).float(), flags], -1)
        mask = done.reshape(-1, *[1] * (after.ndim - 1))
        fresh = domain.start(reset, self.episodes_done + 1)
        return index, epsilon, seen, before, after, torch.where(mask, fresh, after)

    def _learn_block(
        self,
        flat: Tensor,
        mean: Tensor,
        square: Tensor,
        replay: Tensor,
        before: Tensor,
        after: Tensor,
        fresh: Tensor,
        value: Tensor,
        seen: Tensor,
        learning: Tensor,
        rows: Tensor,
        rates: Tensor,
    ) -> Tensor:
        """Step 4. Returns Q(s′) before, Q of the state acted on next after, change and loss."""
        lane = torch.arange(len(flat), device=flat.device).unsqueeze(-1)
        batch = self._minibatch(replay[lane, rows])
        extra = self._inputs(after.unsqueeze(1))
        parameters = (flat, mean, square)
        own_rates = rates.view(-1, 1, 1) * learning.view(1, -1, 1)
        options: dict[str, Any] = {"gamma": self.gamma, "l2": self.learner.l2, "extra": extra}
        updated, next_value, loss = fit(self.network, parameters, batch, own_rates, **options)
        for old, new in zip(parameters, updated, strict=True):
            old.copy_(new)
        states = torch.stack([fresh, before] if self.needs_change else [fresh], 1)
        now = self.network.forward(flat, self._inputs(states))[-1]
        change = torch.zeros_like(value[:, :1])
        if self.needs_change:
            action = seen[:, -2:-1].long()
            change = (now[..., 1] - value).gather(1, action)
            change = torch.where(learning.unsqueeze(-1), change, 0.0)
        loss = torch.where(learning, loss, 0.0).unsqueeze(-1)
        return torch.cat([next_value[..., 0], now[..., 0], change, loss], 1)

    def _minibatch(self, rows: Tensor) -> Minibatch:
        width = self.domain.record_width
        before, after, reward, action, flags = torch.split(rows, [width, width, 1, 1, 1], -1)
        state = self.domain.restore(torch.cat([before, after], 1))
        inputs = self._inputs(state)
        count = rows.shape[1]
        dense = self.domain.encode(state[:, :count]) if self.network.embedded else inputs
        return Minibatch(
            inputs,
            dense[..., :count],
            action.squeeze(-1).long(),
            reward.squeeze(-1),
            flags.squeeze(-1) > 1,
        )

    def _reflect_step(self, index: Tensor | None, epsilon: Tensor, seen: Tensor) -> Tensor:
        """Steps 3, 5 and 6. Returns the lanes whose episode counts and has ended."""
        actions = self.domain.num_actions
        sizes = [actions, actions, 1, 1]
        next_value, value, change, loss = torch.split(self.learned, sizes, -1)
        reward, flags = seen[:, -3], seen[:, -1]
        done = flags > 0
        left = values_left(self.value, seen[:, -2].long()) if self.needs_values else None
        change = change.squeeze(-1)
        self._update_strategy(index, reward, flags > 1, done, next_value, change, left)
        self.value.copy_(value)
        return self._count_episodes(done, epsilon, reward, loss.squeeze(-1))

    def _keep(self, ends: Tensor) -> None:
        """Remember the networks of the lanes whose episode has just ended, for their test."""
        mask = ends[self.lanes].unsqueeze(-1)
        torch.where(mask, self.flat, self.snapshot, out=self.snapshot)

    def _ended_policies(self, lanes: Tensor) -> Tensor:
        return self.snapshot[self._slots()[lanes]]

    def _slots(self) -> Tensor:
        """Where each lane is kept: the inverse of ``lanes``."""
        return torch.empty_like(self.lanes).index_copy_(
            0, self.lanes, torch.arange(self.runs, device=self.device)
        )

    def _choose(self, policy: Tensor, state: Tensor) -> Tensor:
        return self.network.forward(policy, self._inputs(state))[-1].argmax(1)

    def _harvest(self) -> None:
        super()._harvest()
        self._compact()

    def _compact(self) -> None:
        """Gather the unfinished lanes in as few blocks as possible, the last as small as can be."""
        active = self.episodes_done < self.episodes
        left, block = int(active.sum()), self.block
        blocks = max(-(-left // block), 1)
        while blocks == 1 and left <= block // 2 and block // 2 >= SMALLEST_BLOCK:
            block //= 2
        if (blocks, block) == (self.blocks, self.block):
            return
        kept, unfinished = blocks * block, active[self.lanes]
        source = unfinished[kept:].nonzero().squeeze(-1) + kept
        target = (~unfinished[:kept]).nonzero().squeeze(-1)[: len(source)]
        for tensor in (self.flat, self.mean, self.square, self.snapshot, self.replay, self.lanes):
            moved = tensor[source]
            tensor[source] = tensor[target]
            tensor[target] = moved
        self._divide(blocks, block)

    def _divide(self, blocks: int, block: int) -> None:
        self.blocks = blocks
        if block != self.block:
            self.block = block
            self._learn = self._compile_learning()

    def export(self, network: QNetwork) -> None:
        """Write the weights of every run into `network`."""
        self.network.unpack(self.flat[self._slots()], network)

    _NETWORKS = ("flat", "mean", "square", "snapshot", "replay", "lanes", "value", "learned")

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`Lockstep.state_dict`."""
        state = super().state_dict()
        state["tensors"] |= {name: getattr(self, name).clone() for name in self._NETWORKS}
        return state | {"blocks": self.blocks, "block": self.block}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See :meth:`Lockstep.load_state_dict`."""
        super().load_state_dict(state)
        self._divide(state["blocks"], state["block"])
