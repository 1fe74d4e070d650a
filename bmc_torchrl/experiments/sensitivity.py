"""How ε-BMC depends on its prior and on the scale of rewards: bmc sensitivity.

For a tabular experiment, writes sensitivity.csv (AUC for prior strengths α₀ and for rewards times a
factor, with b₀ as it is and with b₀ scaled along) and posterior.csv (α and β by episode) to
<output>/<experiment>, and with results=results to results/<experiment>, which has none yet.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from omegaconf import DictConfig
from rich.progress import track

from bmc_torchrl.analysis.scoring import measure
from bmc_torchrl.analysis.tables import write_csv
from bmc_torchrl.errors import SettingsError
from bmc_torchrl.experiments.build import build_engine, build_strategy, strategy_seed
from bmc_torchrl.experiments.configs import configured_by, experiment_config
from bmc_torchrl.experiments.memory import bytes_of_a_run, require_memory
from bmc_torchrl.experiments.settings import require_choice, require_integer
from bmc_torchrl.experiments.sweep import require_new
from bmc_torchrl.lockstep.interface import Engine

__all__ = ["REWARDS", "TABLES", "compute", "main"]

REWARDS = {
    "grid_sarsa": {"domain.env.grid.move_reward": -0.1, "domain.env.grid.blocked_reward": -0.2},
    "cart_sarsa": {"domain.env.model.step_reward": 1.0},
}
TARGETS = {"grid_sarsa": ["+domain.env.grid={_target_: bmc_torchrl.envs.SubgoalGrid}"]}
B0 = 500.0
TABLES = ("sensitivity.csv", "posterior.csv")


def _engine_of(cfg: DictConfig, overrides: list[str]) -> Engine:
    settings = experiment_config(cfg.name, [f"episodes={cfg.episodes}", *overrides])
    strategy = build_strategy(settings, [settings.strategy], cfg.runs)
    seed = strategy_seed(cfg.seed, "bmc")
    return build_engine(settings, strategy, seed=seed, threads=cfg.threads)


def _variants(cfg: DictConfig) -> Iterator[tuple[dict[str, object], list[str]]]:
    """What is varied, and the overrides that do it."""
    for alpha0 in cfg.alpha0:
        prior = [f"families.bmc.alpha0={alpha0}", f"families.bmc.beta0={alpha0 + 0.01}"]
        yield {"parameter": "alpha0", "value": alpha0, "variant": ""}, prior
    for scale in cfg.reward_scale:
        rewards = [f"+{key}={value * scale}" for key, value in REWARDS[cfg.name].items()]
        rewards = [*TARGETS.get(cfg.name, []), *rewards, f"learner.scale={0.1 * scale}"]
        wider = "+families.bmc.prior={{_target_: bmc_torchrl.NormalGammaPrior, b0: {}}}"
        for variant, b0 in (("b₀ = 500", B0), ("b₀ · scale²", B0 * scale**2)):
            row = {"parameter": "reward_scale", "value": scale, "variant": variant}
            yield row, [*rewards, wider.format(b0)]


def _posterior(cfg: DictConfig) -> pd.DataFrame:
    """α and β, averaged over runs, as the episodes go by."""
    engine, rows = _engine_of(cfg, []), []
    settings = experiment_config(cfg.name)
    strategy: Any = build_strategy(settings, [settings.strategy], cfg.runs)
    while not engine.finished:
        engine.advance(20)
        engine.write_strategy(strategy)
        episode = float(engine.episodes_done.double().mean())
        rows.append((episode, float(strategy.alpha.mean()), float(strategy.beta.mean())))
    table = pd.DataFrame(rows, columns=["episode", "alpha", "beta"])
    return table.drop_duplicates("episode").iloc[:: max(1, len(table) // 400)]


def _check(cfg: DictConfig) -> None:
    """Raise for what cannot be run, before anything runs."""
    require_choice(cfg, "name", tuple(REWARDS))
    for name, least in (("runs", 1), ("episodes", 1), ("seed", 0), ("threads", 1)):
        require_integer(cfg, name, least)
    for name in ("alpha0", "reward_scale"):
        wrong = [value for value in cfg[name] if not 0 < float(value) < math.inf]
        if wrong:
            raise SettingsError(f"{name} must be positive numbers, got {wrong}.")
    settings = experiment_config(cfg.name, [f"episodes={cfg.episodes}"])
    needed = cfg.runs * bytes_of_a_run(settings)
    require_memory(needed, f"runs={cfg.runs} episodes={cfg.episodes}")
    for name in TABLES if cfg.results is not None else ():
        require_new(Path(cfg.results) / cfg.name / name)


def compute(cfg: DictConfig) -> None:
    """Vary the prior and the scale of rewards, and write what was found."""
    torch.set_num_threads(1)
    _check(cfg)
    rows, column = [], measure(cfg.name).column
    for row, overrides in track(list(_variants(cfg)), cfg.name):
        engine = _engine_of(cfg, overrides)
        while not engine.finished:
            engine.advance(2000)
        auc = (engine.steps if column == "steps" else engine.returns).mean(-1)
        error = float(auc.std() / len(auc) ** 0.5) if len(auc) > 1 else math.nan
        rows.append({**row, "auc": float(auc.mean()), "auc_se": error})
    tables = dict(zip(TABLES, (pd.DataFrame(rows), _posterior(cfg)), strict=True))
    for folder in filter(None, (cfg.output, cfg.results)):
        for name, table in tables.items():
            write_csv(Path(folder) / cfg.name / name, table)
            print(Path(folder) / cfg.name / name)


main = configured_by("sensitivity")(compute)
