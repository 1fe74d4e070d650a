# Sourced by run.sh, test.sh and .ci/run: makes .venv at the root once and activates it.
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
stamp=$(cat pyproject.toml constraints.txt | sha256sum | cut -d' ' -f1)
exec 9>.venv.lock && flock 9
if [ "$(cat .venv/.installed 2>/dev/null)" != "$stamp" ]; then
  python=$(command -v python3.11 || command -v python3) || { echo "Python 3.11 or newer is needed." >&2; exit 1; }
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed, found $("$python" --version)." >&2; exit 1; }
  echo "Setting up .venv, once (a few minutes) ..."
  [ -x .venv/bin/python ] || "$python" -m venv .venv || exit 1
  # torch first and pinned: whatever comes after finds it installed.
  .venv/bin/python -m pip install -q -c constraints.txt torch &&
    .venv/bin/python -m pip install -q -c constraints.txt -e '.[experiments,examples,dev]' || exit 1
  echo "$stamp" > .venv/.installed
fi
exec 9>&-
. .venv/bin/activate
