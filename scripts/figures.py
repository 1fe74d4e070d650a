"""Door to ``bmc figures``: python scripts/figures.py results --out figures."""

import sys

from bmc_torchrl.experiments.figures import main

if __name__ == "__main__":
    sys.exit(main())
