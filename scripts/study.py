"""Door to ``bmc study``: python scripts/study.py [overrides]."""

from bmc_torchrl.experiments.study import main

if __name__ == "__main__":
    main()
