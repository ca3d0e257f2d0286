#!/usr/bin/env bash
# Sets up everything, then runs the tests; arguments go to pytest:  bash tools/test.sh tests/unit -k packing
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash tools/install.sh

# Several processes share few cores here: a thread each, no spinning. And nothing is to be fetched.
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
if (($#)); then exec .venv/bin/python -m pytest "$@"; fi

# Unit tests start no process, so two of them run at a time; the others have the machine to themselves, and share servers.
status=0
.venv/bin/python -m pytest tests/unit -n 2 --dist worksteal || status=$?
.venv/bin/python -m pytest --ignore tests/unit || status=$?
exit "$status"
