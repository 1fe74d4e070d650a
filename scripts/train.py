"""Door to ``bmc train``: python scripts/train.py experiment=cart_dqn strategy=bmc runs=8."""

from bmc_torchrl.experiments.train import main

if __name__ == "__main__":
    main()
