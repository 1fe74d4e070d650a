#!/usr/bin/env bash
# Builds the site to outputs/site: pictures, tutorials (a minute), then MkDocs, whose warnings are errors.
# Without arguments everything; `bash scripts/docs.sh pages` takes the pictures and tutorials that are there.
set -eu
. "$(dirname "$0")/setup.sh"
export OMP_NUM_THREADS=1
made=$PWD/outputs/docs
if [ "${1:-}" != pages ]; then
  rm -rf "$made"
  python scripts/site/pictures.py "$made/assets"
  python scripts/site/tutorials.py "$made/tutorials"
fi
NO_MKDOCS_2_WARNING=1 python -m mkdocs build --strict --config-file scripts/site/mkdocs.yml
echo "outputs/site/index.html is ready; it needs no server and no network."
