#!/usr/bin/env bash
# Runs the main job, after setting up .venv where there is none: bash scripts/run.sh [overrides]
# Grid-world, expected SARSA: ε-BMC beside four tuned schedules, 100 runs of each.
set -eu
. "$(dirname "$0")/setup.sh"
echo "Loading torch and Lightning (some seconds), then grid-world: ε-BMC beside four schedules, 100 runs each ..."
exec python scripts/train.py experiment=grid_sarsa \
  'strategies=[bmc,fixed_01,geom_095,power_05,vdbe_005]' runs=100 output=outputs/main "$@"
