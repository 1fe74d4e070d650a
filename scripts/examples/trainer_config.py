"""ε-BMC from TorchRL's trainer configs: python scripts/examples/trainer_config.py frames=2000.

Everything is in ``trainer_config.yaml``: TorchRL's config nodes, our ``_target_`` among them.
"""

from __future__ import annotations

import hydra
import torch
import torchrl.trainers.algorithms.configs  # noqa: F401, registers TorchRL's config nodes
from hydra.utils import instantiate
from omegaconf import DictConfig
from torchrl.trainers.algorithms import DQNTrainer


def train(cfg: DictConfig) -> DQNTrainer:
    torch.manual_seed(0)
    trainer = instantiate(cfg.trainer)
    trainer.train()
    return trainer


@hydra.main(version_base="1.3", config_path=".", config_name="trainer_config")
def main(cfg: DictConfig) -> None:
    trainer = train(cfg)
    print(f"ε is {float(trainer.greedy_module.eps):.4f} after {trainer.collected_frames} frames.")


if __name__ == "__main__":
    main()
