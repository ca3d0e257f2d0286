#!/usr/bin/env bash
# What is too long for every change: the whole matrix of layouts and methods, and the comparison with verl and TRL.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash tools/install.sh
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
.venv/bin/python tools/check_layouts.py
.venv/bin/python tools/check_replay.py
bash tools/peer_env.sh
.peer/bin/python -m pytest tests/peer
