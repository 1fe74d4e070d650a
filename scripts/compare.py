"""Door to ``bmc compare``: python scripts/compare.py RESULTS PUBLISHED.xlsx."""

import sys

from bmc_torchrl.experiments.compare import main

if __name__ == "__main__":
    sys.exit(main())
