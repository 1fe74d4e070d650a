"""``python -m bmc_torchrl`` is the console command ``bmc``."""

import sys

from bmc_torchrl.experiments.command import main

if __name__ == "__main__":
    sys.exit(main())
