#!/usr/bin/env bash
# Sets up everything, then runs the tests; arguments go to pytest:  bash tools/test.sh tests/unit -k packing
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash tools/install.sh

# Several processes share few cores here: a thread each, no spinning. And nothing is to be fetched.
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
exec .venv/bin/python -m pytest "$@"
