#!/usr/bin/env bash
# Runs the tests, after setting up .venv where there is none: bash scripts/test.sh [pytest arguments]
set -eu
. "$(dirname "$0")/setup.sh"
if ! python -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("triton") is None)'; then
  echo "triton, once, for the tests of the kernels for CUDA (290 MB)"
  pip_install --quiet -e '.[kernels]' || echo "Without it their tests are skipped."
fi
export OMP_NUM_THREADS=1
echo "Collecting the tests (some seconds) ..."
exec python -m pytest -n 2 --dist worksteal "$@"
