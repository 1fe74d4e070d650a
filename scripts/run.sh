#!/usr/bin/env bash
# Runs the main job, after setting up .venv where there is none: bash scripts/run.sh [overrides]
set -eu
. "$(dirname "$0")/setup.sh"
exec python scripts/demo.py "$@"
