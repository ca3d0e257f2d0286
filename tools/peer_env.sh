#!/usr/bin/env bash
# Makes the environment in which tests/peer compares this project with the packages verl and TRL; a second call finds it done.
# Neither engine goes in: the methods need torch and numpy alone, and verl and TRL pin other versions of what the engines want.
#
#   bash tools/peer_env.sh           # in .peer, about 2 GB
#   bash tools/peer_env.sh FOLDER    # in another folder
#
# PYTHON           the interpreter to build on; python3.11 otherwise
# TORCH_INDEX_URL  an index that has PyTorch's CPU build; the default build works too, it is only larger
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$(realpath -m "${1:-$root/.peer}")
cd "$root"

python=${PYTHON:-python3.11}
stamp=$venv/installed
torch=2.13.0

say() { printf '[peer_env] %s\n' "$*"; }
fail() { printf '[peer_env] %s\n' "$*" >&2; exit 1; }
pip_install() { "$venv/bin/python" -m pip --disable-pip-version-check -qq install --root-user-action=ignore "$@"; }
how_to_run() { say "run:  $venv/bin/python -m pytest tests/peer"; }

wanted=$({ printf '%s\n' "$root"; cat tools/peer_env.sh tools/peer_requirements.txt setup.py; } | sha256sum | cut -d' ' -f1)
if [[ -f $stamp && $(<"$stamp") == "$wanted" ]]; then
    say "everything is installed in $venv"
    how_to_run
    exit 0
fi
if [[ ! -x $venv/bin/python ]]; then
    command -v "$python" >/dev/null || fail "$python is missing; install Python 3.11 with its venv module, or set PYTHON to one"
    say "make $venv with $("$python" --version)"
    "$python" -m venv "$venv" || fail "$python has no venv module; on Debian and Ubuntu: apt-get install python3.11-venv"
fi
say "torch $torch"
pip_install "torch==$torch" ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"}
say "verl, TRL and what the tests import"
pip_install -r tools/peer_requirements.txt
pip_install --no-deps -e .
printf '%s\n' "$wanted" >"$stamp"
say "done in $SECONDS s"
how_to_run
