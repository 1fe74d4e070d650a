"""From settings to objects: strategies, engines, and jobs that Lightning can fit."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torchrl.envs import InitTracker, TransformedEnv

from bmc_torchrl import (
    AdaptiveEGreedyModule,
    EpsilonStrategy,
    OneStepReturns,
    Replacement,
    StackedEpsilon,
)
from bmc_torchrl.errors import SettingsError
from bmc_torchrl.experiments.configs import plain, replaces_uniformly
from bmc_torchrl.experiments.settings import chosen_device, chosen_strategies
from bmc_torchrl.exploration import VALUE_KEYS
from bmc_torchrl.learners.builders import build_learner, build_network
from bmc_torchrl.learners.q_learning import Target, dqn_loss
from bmc_torchrl.learners.settings import DQNSettings, LearnerSettings, RunSettings
from bmc_torchrl.lockstep.interface import Engine, engine_class, make_engine
from bmc_torchrl.training import (
    EpsilonGreedyDQN,
    EpsilonGreedyLearner,
    GreedyEvaluation,
    StopAfterPerfectTests,
    TransitionStream,
)
from bmc_torchrl.training.lockstep_module import ChunkStream, LockstepLearner
from bmc_torchrl.training.run_records import RecordedLearner
from bmc_torchrl.training.transitions import seed_everything
from bmc_torchrl.training.video import GreedyVideo

__all__ = [
    "Job",
    "build_bank",
    "build_engine",
    "build_job",
    "build_strategy",
    "run_settings",
    "settings_of",
    "strategy_seed",
]

Job = tuple[RecordedLearner, TransitionStream | ChunkStream | None, list[Any]]


def build_strategy(cfg: DictConfig, entries: Sequence[Any], runs: int) -> EpsilonStrategy:
    """The strategies of `entries`, `runs` runs each, side by side."""
    parts = [_instantiated(cfg, entry, batch_shape=[runs]) for entry in entries]
    return parts[0] if len(parts) == 1 else StackedEpsilon(parts)


def build_bank(cfg: DictConfig) -> dict[str, EpsilonStrategy]:
    """The strategies of ``whatif=``, by label; none by default."""
    return {entry.label: _instantiated(cfg, entry) for entry in cfg.whatif.strategies}


def _instantiated(cfg: DictConfig, entry: Any, **options: Any) -> EpsilonStrategy:
    given = {**cfg.families.get(entry.family, {}), **entry.parameters}
    strategy: EpsilonStrategy = instantiate(given, **options)
    return strategy


def settings_of(cfg: DictConfig, entries: Sequence[Any]) -> DictConfig:
    """The settings that the strategies of `entries` run with, some of which a family may change."""
    changes = cfg.get("by_family") or {}
    wanted = {entry.family: changes.get(entry.family, {}) for entry in entries}
    first, *others = wanted.values()
    if any(other != first for other in others):
        raise SettingsError(
            f"strategies: {' and '.join(wanted)} run with other settings "
            f"({plain(cfg.by_family)}), as in the published data: train them in jobs of their own, "
            "or set by_family={} for none."
        )
    return cast(DictConfig, OmegaConf.merge(cfg, first))


def run_settings(cfg: DictConfig, *, seed: int, first_run: int = 0) -> RunSettings:
    """What the settings say of every run, whatever learns."""
    return RunSettings(
        gamma=cfg.gamma,
        episodes=cfg.episodes,
        tests=cfg.domain.tests,
        mask_terminated=cfg.settings.mask_terminated,
        next_action=cfg.settings.next_action,
        stop_after_perfect_tests=cfg.stop_after_perfect_tests,
        seed=seed,
        first_run=first_run,
    )


def learner_settings(cfg: DictConfig) -> LearnerSettings:
    """The settings' learner, checked."""
    try:
        made: LearnerSettings = instantiate(cfg.learner)
    except InstantiationException as error:
        raise SettingsError(f"learner: {error.__cause__}") from error
    return made


def build_engine(
    cfg: DictConfig,
    strategy: EpsilonStrategy,
    *,
    device: Any = "cpu",
    seed: int,
    first_run: int = 0,
    **options: Any,
) -> Engine:
    """The lockstep engine of the settings' learner, with the engine's own `options`."""
    refused = beyond_engines(cfg)
    if refused is not None:
        raise SettingsError(refused)
    runs = strategy.batch_shape.numel()
    env = instantiate(cfg.domain.env)(batch_size=[runs], device=device, observation=cfg.observation)
    run = run_settings(cfg, seed=seed, first_run=first_run)
    return make_engine(env, strategy, run, learner_settings(cfg), **options)


def strategy_seed(seed: int, label: str) -> int:
    """A seed of its own for each strategy: what a cell gives does not depend on its neighbours."""
    return zlib.crc32(f"{seed}/{label}".encode())


def beyond_engines(cfg: DictConfig) -> str | None:
    """Why no lockstep engine can run what the settings ask for, if so."""
    remedy = "use engine=torchrl, or auto."
    if not replaces_uniformly(cfg):
        kind = cfg.explore["_target_"].rpartition(".")[2]
        return f"explore: lockstep engines replace actions uniformly, not by {kind}; {remedy}"
    if cfg.whatif.strategies:
        return f"whatif: lockstep engines keep their transitions to themselves; {remedy}"
    return None


def uses_lockstep(cfg: DictConfig, strategy: EpsilonStrategy) -> bool:
    """Whether a lockstep engine is asked for, or can run all of it by itself."""
    if cfg.engine != "auto":
        return bool(cfg.engine == "lockstep")
    if beyond_engines(cfg) is not None:
        return False
    if not cfg.domain.native or cfg.runs == 1 or cfg.trainer.lightning.devices != 1:
        return False
    engine = engine_class(learner_settings(cfg), chosen_device(cfg.device))
    return engine is not None and engine.can_run(strategy)


def build_job(cfg: DictConfig) -> Job:
    """The learner, what it iterates over, and the callbacks of its own."""
    seed_everything(cfg.seed)
    entries = chosen_strategies(cfg)
    cfg = settings_of(cfg, entries)
    strategy = build_strategy(cfg, entries, cfg.runs)
    if uses_lockstep(cfg, strategy):
        return _build_lockstep(cfg, strategy)
    learner = learner_settings(cfg)
    if isinstance(learner, DQNSettings):
        return _build_dqn(cfg, strategy, learner)
    return _build_published(cfg, strategy, learner)


def _build_lockstep(cfg: DictConfig, strategy: EpsilonStrategy) -> Job:
    device = chosen_device(cfg.device)
    engine = build_engine(cfg, strategy.to(device), device=device, seed=cfg.seed)
    learner = LockstepLearner(engine, strategy, runs=engine.runs, episodes=cfg.episodes)
    steps = cfg.trainer.lockstep_chunk_steps
    chunks = -(-cfg.episodes * cfg.domain.max_steps // steps) + 1
    return learner, ChunkStream(steps, chunks), []


def _build_dqn(cfg: DictConfig, strategy: EpsilonStrategy, learner: DQNSettings) -> Job:
    run, runs = run_settings(cfg, seed=cfg.seed), strategy.batch_shape.numel()
    make_env = instantiate(cfg.domain.env)
    options = {"device": chosen_device(cfg.device), "observation": cfg.observation}
    env = make_env(batch_size=[runs], **options)
    dimension = None if runs == 1 else runs
    network, key = build_network(env, dimension or (), learner.hidden, learner.dueling)
    name: Target = "double_dqn" if learner.double else "dqn"
    compile, test_every = bool(cfg.trainer.compile), cfg.domain.get("test_every", 1)
    alone = cfg.trainer.lightning.devices == 1
    chunk_steps = cfg.trainer.chunk_steps if alone else 1
    module = EpsilonGreedyDQN(
        env,
        network,
        strategy,
        explore=instantiate(cfg.explore),
        gamma=run.gamma,
        lr=learner.learning_rate,
        loss=functools.partial(dqn_loss, name, run.gamma, dimension) if learner.torchrl else name,
        loss_function=learner.loss_function,
        batch_size=learner.batch_size,
        buffer_size=learner.capacity,
        learning_starts=max(learner.warmup, learner.batch_size),
        n_steps=learner.n_steps,
        prioritized=learner.prioritized,
        target_tau=learner.target_tau,
        target_interval=learner.target_interval,
        mask_terminated=run.mask_terminated,
        runs=dimension,
        episodes=run.episodes,
        test_every=test_every,
        observation_key=key,
        epoch_steps=run.episodes * cfg.domain.max_steps,
        shared_posterior=cfg.shared_posterior,
        chunk_steps=chunk_steps,
        max_grad_norm=learner.max_grad_norm,
        compile=compile,
    )
    return module, None, _tests(cfg, run, make_env, options, runs, snapshot=False, at_once=True)


def _tests(
    cfg: DictConfig, run: RunSettings, make_env: Any, options: Any, runs: int, **when: bool
) -> list[Any]:
    """The callbacks that test a job's runs, stop those that are perfect, and film the first."""
    evaluation = GreedyEvaluation(
        make_env(batch_size=[runs, run.tests], **options),
        gamma=cfg.domain.get("test_gamma", run.gamma),
        max_steps=cfg.domain.max_steps,
        seed=run.seed + 1,
        **when,
        one_by_one=not cfg.domain.native,
    )
    own: list[Any] = [evaluation]
    if run.stop_after_perfect_tests is not None:
        own.append(StopAfterPerfectTests(run.stop_after_perfect_tests, cfg.domain.max_steps))
    if cfg.domain.native:
        film = Path(cfg.output) / "greedy.gif"
        own.append(GreedyVideo(film, evaluation.env, cfg.domain.max_steps))
    return own


def _build_published(cfg: DictConfig, strategy: EpsilonStrategy, settings: LearnerSettings) -> Job:
    device, run = chosen_device(cfg.device), run_settings(cfg, seed=cfg.seed)
    runs = strategy.batch_shape.numel()
    make_env = instantiate(cfg.domain.env)
    options = {"device": device, "observation": cfg.observation}
    env = make_env(batch_size=[runs], **options)
    q_actor, rule = build_learner(settings, env, run.gamma)
    replacement: Replacement = instantiate(cfg.explore).to(device)
    acted = TransformedEnv(env, InitTracker()) if replacement.remembers else env
    test_every = cfg.domain.get("test_every", 1)
    masked = "terminated" if run.mask_terminated else None
    values = VALUE_KEYS[0] in strategy.in_keys
    returns = OneStepReturns(q_actor, run.gamma, terminated_key=masked, values=values)
    learner = EpsilonGreedyLearner(
        q_actor,
        AdaptiveEGreedyModule(
            env.action_spec,
            strategy,
            action_mask_key=returns.action_mask_key,
            explore=replacement,
            device=device,
        ),
        returns,
        rule,
        runs=runs,
        episodes=run.episodes,
        next_action=run.next_action,
        shared_posterior=cfg.shared_posterior,
        test_every=test_every,
        compile=plain(cfg.trainer)["compile"],
    )
    chunk_steps = cfg.trainer.chunk_steps * test_every
    chunks = -(-run.episodes * cfg.domain.max_steps // chunk_steps)
    stream = TransitionStream(acted, learner.policy, chunk_steps=chunk_steps, num_chunks=chunks)
    all_end_with_a_chunk = (
        cfg.domain.shortest_episode == cfg.domain.max_steps
        and cfg.domain.max_steps % chunk_steps == 0
    )
    tests = _tests(cfg, run, make_env, options, runs, snapshot=not all_end_with_a_chunk)
    return learner, stream, tests
