"""Train one job: python scripts/train.py experiment=cart_dqn strategy=bmc runs=8 episodes=20."""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import cloudpickle
import hydra
import lightning as L  # noqa: N812
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from hydra.types import RunMode
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

sys.path.insert(0, str(Path(__file__).parent))
import composition
from composition import build_engine, build_strategy, has_engine

from bmc_torchrl import AdaptiveEGreedyModule, OneStepReturns
from bmc_torchrl.lockstep.learner import ChunkStream, LockstepLearner
from bmc_torchrl.training import (
    AtomicCheckpoint,
    EpisodeProgress,
    EpsilonGreedyLearner,
    GreedyEvaluation,
    ResultsTable,
    StopAfterPerfectTests,
    TransitionStream,
)
from bmc_torchrl.training.recorded import RecordedLearner
from bmc_torchrl.training.reporting import report
from bmc_torchrl.training.settings import check_settings, chosen_device, chosen_strategies
from bmc_torchrl.training.stream import seed_everything
from bmc_torchrl.training.tracking import PosteriorHistory, WandbReport
from bmc_torchrl.training.video import GreedyVideo

# A launcher's workers do not have this folder on their path.
cloudpickle.register_pickle_by_value(composition)

Job = tuple[RecordedLearner, TransitionStream | ChunkStream, list[Any]]


def uses_lockstep(cfg: DictConfig) -> bool:
    """Whether the lockstep engine is asked for, or chooses itself."""
    if cfg.engine != "auto":
        return bool(cfg.engine == "lockstep")
    one_device = cfg.trainer.lightning.devices == 1
    return bool(cfg.domain.native and cfg.runs > 1 and has_engine(cfg) and one_device)


def build(cfg: DictConfig) -> Job:
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


def callbacks(cfg: DictConfig, own: list[Any], output: Path) -> list[Any]:
    labels = [entry.label for entry in chosen_strategies(cfg)]
    plain = OmegaConf.to_container(cfg, resolve=True)
    history = PosteriorHistory(output / "posterior", cfg.trainer.log_every_n_chunks)
    table = output / "table.parquet"
    return [
        *own,
        history,
        ResultsTable(table, experiment=cfg.name, strategies=labels, config=plain, seed=cfg.seed),
        EpisodeProgress(),
        AtomicCheckpoint(output, cfg.trainer.checkpoint_every_n_chunks),
        WandbReport(history, table, output / "last.ckpt", output / "greedy.gif"),
    ]


def fit(
    cfg: DictConfig,
    learner: RecordedLearner,
    stream: TransitionStream | ChunkStream,
    own: list[Any],
) -> L.Trainer:
    torch.set_num_threads(cfg.trainer.threads)
    device, output = chosen_device(cfg.device), Path(cfg.output)
    placed = {"accelerator": "cpu"} if device.type == "cpu" else {}
    if ":" in cfg.device:
        placed["devices"] = [device.index]
    checkpoint = output / "last.ckpt"
    resume = str(checkpoint) if cfg.resume and checkpoint.exists() else None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")
        make_trainer = instantiate(cfg.trainer.lightning, _partial_=True, **placed)
        trainer: L.Trainer = make_trainer(
            logger=instantiate(cfg.logger), callbacks=callbacks(cfg, own, output)
        )
        for logger in trainer.loggers:
            logger.log_hyperparams(OmegaConf.to_container(cfg, resolve=True))
        trainer.fit(learner, stream, ckpt_path=resume, weights_only=True)
    stream.shutdown()
    return trainer


@hydra.main(version_base=None, config_path="../configs", config_name="train")
def main(cfg: DictConfig) -> None:
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        cfg.output = HydraConfig.get().runtime.output_dir
    for name in ("lightning.pytorch", "torchrl"):
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        check_settings(cfg)
        job = build(cfg)
    except (ValueError, InstantiationException) as error:
        raise SystemExit(f"These settings cannot be run. {error}") from error
    if fit(cfg, *job).is_global_zero:
        report(Path(cfg.output), figure=cfg.figure)


if __name__ == "__main__":
    main()
