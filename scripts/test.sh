#!/usr/bin/env bash
# Runs the tests, after setting up .venv where there is none: bash scripts/test.sh [pytest arguments]
set -eu
. "$(dirname "$0")/setup.sh"
export OMP_NUM_THREADS=1
echo "Collecting the tests (some seconds) ..."
exec python -m pytest -n 2 --dist worksteal "$@"
