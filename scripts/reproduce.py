"""Door to ``bmc reproduce``: python scripts/reproduce.py [overrides]."""

from bmc_torchrl.experiments.reproduce import main

if __name__ == "__main__":
    main()
