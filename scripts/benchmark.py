"""Door to ``bmc benchmark``: python scripts/benchmark.py [epsilon envs …]."""

from bmc_torchrl.benchmarks.command import main

if __name__ == "__main__":
    main()
