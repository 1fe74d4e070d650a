# Sourced by run.sh, test.sh and .ci/run: makes .venv at the root once and activates it.
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
stamp=$(cat pyproject.toml constraints.txt | sha256sum | cut -d' ' -f1)

# A line every ten seconds while this shell lives: pip says nothing while it unpacks.
tell_progress() {
  while sleep 10 && kill -0 $$ 2>/dev/null; do
    echo "    ... ${SECONDS} s, $(find .venv/lib -maxdepth 3 -name '*.dist-info' 2>/dev/null | wc -l) packages in .venv"
  done
}

pip_install() {
  .venv/bin/python -m pip install --disable-pip-version-check -c constraints.txt "$@"
}

exec 9>.venv.lock
flock -n 9 || { echo "Another set-up of .venv is under way, waiting for it ..."; flock 9; }
if [ "$(cat .venv/.installed 2>/dev/null)" != "$stamp" ]; then
  python=$(command -v python3.11 || command -v python3) || { echo "Python 3.11 or newer is needed." >&2; exit 1; }
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed, found $("$python" --version)." >&2; exit 1; }
  echo "Setting up .venv, once (a few minutes). [1/3] Python"
  tell_progress 9>&- &
  teller=$!
  [ -x .venv/bin/python ] || "$python" -m venv .venv || exit 1
  # torch first and pinned: whatever comes after finds it installed.
  echo "[2/3] torch"
  pip_install torch || exit 1
  echo "[3/3] the library, and what trains, draws, tests and documents"
  pip_install -e '.[experiments,examples,dev,docs]' || exit 1
  kill "$teller"
  echo "$stamp" > .venv/.installed
  echo ".venv is ready."
fi
exec 9>&-
. .venv/bin/activate
