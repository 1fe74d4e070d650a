"""What the trainer iterates over: chunks of vector steps of a TorchRL collector."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn
from torchrl.collectors import Collector
from torchrl.envs import EnvBase

from bmc_torchrl.learners.ranks import from_all_ranks, of_this_rank, rank

__all__ = ["TransitionStream"]


class TransitionStream:
    """A sized, stateful loader whose batches are iterators over vector steps.

    A vector step is one transition of every run, ``[runs]``, taken only when it is asked for: what
    is learned from one is known to the policy before the next. The state to resume from is the
    collector's, the environments', and the random numbers'. In a distributed run every rank has its
    own environments and random numbers, and a checkpoint has those of all.

    Args:
        env: the environments, batch size ``[runs]`` or ``()``.
        policy: the exploring policy.
        chunk_steps: vector steps per chunk.
        num_chunks: chunks in all; the trainer may stop before.
        compile: compile the policy, as TorchRL's reference scripts do.

    >>> from bmc_torchrl.envs import SubgoalGridEnv
    >>> stream = TransitionStream(SubgoalGridEnv(batch_size=[3]), None, chunk_steps=5, num_chunks=2)
    >>> [[step.batch_size for step in chunk] for chunk in stream][1][4]
    torch.Size([3])
    """

    def __init__(
        self,
        env: EnvBase,
        policy: nn.Module | None,
        *,
        chunk_steps: int,
        num_chunks: int,
        compile: bool | dict[str, Any] = False,
    ) -> None:
        if chunk_steps < 1 or num_chunks < 1:
            raise ValueError(
                f"chunk_steps and num_chunks must be positive, got {chunk_steps} and {num_chunks}."
            )
        _require_own_names(env, policy)
        self.env, self.policy = env, policy
        self.chunk_steps, self.num_chunks = chunk_steps, num_chunks
        self.position = 0
        self._compile = compile
        self._collector: Collector | None = None
        self._steps: Iterator[TensorDictBase] | None = None
        self._resume: dict[str, Any] | None = None

    def __len__(self) -> int:
        return self.num_chunks

    def __iter__(self) -> Iterator[Iterator[TensorDictBase]]:
        self._start()
        while self.position < self.num_chunks:
            self.position += 1
            yield self._chunk()

    def _start(self) -> None:
        """Build the collector when the policy is on its device, and go on where it stopped."""
        if self._collector is None:
            if rank() and self._resume is None:
                seed_everything(torch.initial_seed() + rank())
            runs = max(self.env.batch_size.numel(), 1)
            self._collector = Collector(
                self.env,
                self.policy,
                frames_per_batch=runs,
                total_frames=-1,
                track_traj_ids=False,
                auto_register_policy_transforms=False,
                compile_policy=self._compile,
            )
            self._steps = iter(self._collector)
        if self._resume is not None:
            resume, self._resume = self._resume, None
            self._collector._carrier = TensorDict.from_dict(
                resume["carrier"], batch_size=self.env.batch_size, device=self.env.device
            )
            self._collector._frames = resume["frames"]
            self.env.load_state_dict(resume["env"])
            restore_random_state(resume["random"])

    def _chunk(self) -> Iterator[TensorDictBase]:
        assert self._steps is not None
        for _ in range(self.chunk_steps):
            step = next(self._steps)
            # The one step of an unbatched environment is one run, whose dimension is not "time".
            yield step.squeeze(-1) if step.batch_dims == 2 else step[0].unsqueeze(0)

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on exactly from here: plain numbers and tensors."""
        if self._collector is None:
            return {"position": self.position}
        carrier = self._collector._carrier.exclude("next")
        own = {
            "frames": self._collector._frames,
            "carrier": carrier.clone().cpu().to_dict(),
            "env": self.env.state_dict(),
            "random": random_state(),
        }
        return {"position": self.position, "ranks": from_all_ranks(own)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved state at the next iteration."""
        self.position = state_dict["position"]
        self._resume = of_this_rank(state_dict["ranks"]) if "ranks" in state_dict else None

    def shutdown(self) -> None:
        """Close the environments."""
        if self._collector is not None:
            self._collector.shutdown()
            self._collector = None


def _require_own_names(env: EnvBase, policy: nn.Module | None) -> None:
    """Refuse an environment whose entries the policy or the algorithm would write over."""
    observed = {str(key): key for key in env.observation_spec.keys(True)}
    parts = () if policy is None else policy.modules()
    for key in (getattr(part, "epsilon_key", None) for part in parts):
        if key is not None and str(key) in observed:
            raise ValueError(
                f"env observes {key!r}, which the policy writes over: rename it in env, or "
                "pass epsilon_key= to AdaptiveEGreedyModule."
            )
    if "collector" in observed:
        raise ValueError(
            "env observes 'collector', which is TorchRL's own entry: rename it in env, for example "
            "by RenameTransform."
        )


def seed_everything(seed: int) -> None:
    """Seed torch's global generators, and NumPy's, from which TorchRL draws by priority."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)


def random_state() -> dict[str, Any]:
    """State of torch's and NumPy's global generators, as tensors and plain numbers."""
    name, words, *rest = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "cpu": torch.get_rng_state(),
        "numpy": [name, torch.from_numpy(np.asarray(words, dtype=np.int64)), *rest],
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    """Set the global generators as :func:`random_state` found them."""
    torch.set_rng_state(state["cpu"].cpu())
    name, words, *rest = state["numpy"]
    np.random.set_state((name, words.cpu().numpy().astype(np.uint32), *rest))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all([s.cpu() for s in state["cuda"]])
