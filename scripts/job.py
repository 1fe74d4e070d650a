"""From settings to a job that Lightning can fit: the learner, its data, and its own callbacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from composition import build_engine, build_strategy, has_engine
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from bmc_torchrl import AdaptiveEGreedyModule, OneStepReturns
from bmc_torchrl.lockstep.learner import ChunkStream, LockstepLearner
from bmc_torchrl.training import (
    EpsilonGreedyLearner,
    GreedyEvaluation,
    StopAfterPerfectTests,
    TransitionStream,
)
from bmc_torchrl.training.recorded import RecordedLearner
from bmc_torchrl.training.settings import chosen_device, chosen_strategies
from bmc_torchrl.training.stream import seed_everything
from bmc_torchrl.training.video import GreedyVideo

Job = tuple[RecordedLearner, TransitionStream | ChunkStream, list[Any]]


def uses_lockstep(cfg: DictConfig) -> bool:
    """Whether the lockstep engine is asked for, or chooses itself."""
    if cfg.engine != "auto":
        return bool(cfg.engine == "lockstep")
    one_device = cfg.trainer.lightning.devices == 1
    return bool(cfg.domain.native and cfg.runs > 1 and has_engine(cfg) and one_device)


def build_job(cfg: DictConfig) -> Job:
    """The learner, what it iterates over, and the callbacks of its own."""
    seed_everything(cfg.seed)
    return build_lockstep(cfg) if uses_lockstep(cfg) else build_torchrl(cfg)


def build_lockstep(cfg: DictConfig) -> Job:
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


def build_torchrl(cfg: DictConfig) -> Job:
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
        compile=OmegaConf.to_object(cfg.trainer.compile)
        if isinstance(cfg.trainer.compile, DictConfig)
        else cfg.trainer.compile,
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
