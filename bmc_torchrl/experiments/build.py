"""From settings to objects: strategies, engines, and jobs that Lightning can fit."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig

from bmc_torchrl import AdaptiveEGreedyModule, EpsilonStrategy, OneStepReturns, StackedEpsilon
from bmc_torchrl.experiments.configs import plain
from bmc_torchrl.experiments.settings import chosen_device, chosen_strategies
from bmc_torchrl.lockstep import interface
from bmc_torchrl.training import (
    EpsilonGreedyLearner,
    GreedyEvaluation,
    StopAfterPerfectTests,
    TransitionStream,
)
from bmc_torchrl.training.lockstep_module import ChunkStream, LockstepLearner
from bmc_torchrl.training.run_records import RecordedLearner
from bmc_torchrl.training.transitions import seed_everything
from bmc_torchrl.training.video import GreedyVideo

__all__ = ["Job", "build_engine", "build_job", "build_strategy", "has_engine", "strategy_seed"]

Job = tuple[RecordedLearner, TransitionStream | ChunkStream, list[Any]]


def build_strategy(cfg: DictConfig, entries: Sequence[Any], runs: int) -> EpsilonStrategy:
    """The strategies of `entries`, `runs` runs each, side by side."""
    parts = [
        instantiate({**cfg.families.get(entry.family, {}), **entry.parameters}, batch_shape=[runs])
        for entry in entries
    ]
    return parts[0] if len(parts) == 1 else StackedEpsilon(parts)


def _kind(cfg: DictConfig) -> str:
    return str(cfg.learner._target_).rsplit(".", 1)[-1]


def has_engine(cfg: DictConfig) -> bool:
    """Whether there is a lockstep engine for the settings' learner and strategies."""
    families = {entry.family for entry in chosen_strategies(cfg)}
    return _kind(cfg) in interface.__all__ and "linear" not in families


def build_engine(
    cfg: DictConfig,
    strategy: EpsilonStrategy,
    *,
    device: Any = "cpu",
    seed: int,
    first_run: int = 0,
    threads: int | None = None,
) -> interface.Engine:
    """The lockstep engine of the settings' learner."""
    kind = _kind(cfg)
    if not has_engine(cfg):
        raise ValueError(f"learner={kind} has no lockstep engine; use engine=torchrl.")
    runs = strategy.batch_shape.numel()
    env = instantiate(cfg.domain.env)(batch_size=[runs], device=device, observation=cfg.observation)
    arguments: Mapping[str, Any] = {k: v for k, v in cfg.learner.items() if k[0] != "_"}
    make: Callable[..., interface.Engine] = getattr(interface, kind)
    return make(
        env,
        strategy,
        gamma=cfg.gamma,
        episodes=cfg.episodes,
        tests=cfg.domain.tests,
        seed=seed,
        mask_terminated=cfg.settings.mask_terminated,
        next_action=cfg.settings.next_action,
        stop_after_perfect_tests=cfg.stop_after_perfect_tests,
        first_run=first_run,
        threads=threads,
        **arguments,
    )


def strategy_seed(seed: int, label: str) -> int:
    """A seed of its own for each strategy: what a cell gives does not depend on its neighbours."""
    return zlib.crc32(f"{seed}/{label}".encode())


def uses_lockstep(cfg: DictConfig) -> bool:
    """Whether the lockstep engine is asked for, or chooses itself."""
    if cfg.engine != "auto":
        return bool(cfg.engine == "lockstep")
    one_device = cfg.trainer.lightning.devices == 1
    return bool(cfg.domain.native and cfg.runs > 1 and has_engine(cfg) and one_device)


def build_job(cfg: DictConfig) -> Job:
    """The learner, what it iterates over, and the callbacks of its own."""
    seed_everything(cfg.seed)
    return _build_lockstep(cfg) if uses_lockstep(cfg) else _build_torchrl(cfg)


def _build_lockstep(cfg: DictConfig) -> Job:
    entries = chosen_strategies(cfg)
    strategy = build_strategy(cfg, entries, cfg.runs)
    device = chosen_device(cfg.device)
    engine = build_engine(cfg, strategy.to(device), device=device, seed=cfg.seed)
    learner = LockstepLearner(
        engine,
        strategy,
        runs=cfg.runs * len(entries),
        episodes=cfg.episodes,
        log_every_n_chunks=1,
    )
    steps = cfg.trainer.lockstep_chunk_steps
    chunks = -(-cfg.episodes * cfg.domain.max_steps // steps) + 1
    return learner, ChunkStream(steps, chunks), []


def _build_torchrl(cfg: DictConfig) -> Job:
    device = chosen_device(cfg.device)
    entries = chosen_strategies(cfg)
    runs = cfg.runs * len(entries)
    make_env = instantiate(cfg.domain.env)
    options = {"device": device, "observation": cfg.observation}
    env = make_env(batch_size=[runs], **options)
    strategy = build_strategy(cfg, entries, cfg.runs)
    q_actor, rule = instantiate(cfg.learner)(env, runs, cfg.gamma)
    test_every = cfg.domain.get("test_every", 1)
    masked = "terminated" if cfg.settings.mask_terminated else None
    returns = OneStepReturns(q_actor, cfg.gamma, terminated_key=masked)
    learner = EpsilonGreedyLearner(
        q_actor,
        AdaptiveEGreedyModule(
            env.action_spec, strategy, action_mask_key=returns.action_mask_key, device=device
        ),
        returns,
        rule,
        runs=runs,
        episodes=cfg.episodes,
        next_action=cfg.settings.next_action,
        shared_posterior=cfg.shared_posterior,
        log_every_n_chunks=cfg.trainer.log_every_n_chunks,
        test_every=test_every,
        compile=plain(cfg.trainer)["compile"],
    )
    chunk_steps = cfg.trainer.chunk_steps * test_every
    chunks = -(-cfg.episodes * cfg.domain.max_steps // chunk_steps)
    stream = TransitionStream(env, learner.policy, chunk_steps=chunk_steps, num_chunks=chunks)
    all_end_with_a_chunk = (
        cfg.domain.shortest_episode == cfg.domain.max_steps
        and cfg.domain.max_steps % chunk_steps == 0
    )
    evaluation = GreedyEvaluation(
        make_env(batch_size=[runs, cfg.domain.tests], **options),
        gamma=cfg.domain.get("test_gamma", cfg.gamma),
        max_steps=cfg.domain.max_steps,
        seed=cfg.seed + 1,
        snapshot=not all_end_with_a_chunk,
    )
    stopping = []
    if cfg.stop_after_perfect_tests is not None:
        stopping = [StopAfterPerfectTests(cfg.stop_after_perfect_tests, cfg.domain.max_steps)]
    video = GreedyVideo(Path(cfg.output) / "greedy.gif", evaluation.env, cfg.domain.max_steps)
    return learner, stream, [evaluation, *stopping, video]
