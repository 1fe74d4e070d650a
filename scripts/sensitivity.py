"""Door to ``bmc sensitivity``: python scripts/sensitivity.py name=grid_sarsa."""

from bmc_torchrl.experiments.sensitivity import main

if __name__ == "__main__":
    main()
