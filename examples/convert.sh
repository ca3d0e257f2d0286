#!/usr/bin/env bash
# A Hugging Face checkpoint to Megatron and back, compared on the way: tensors, logits and routes.
#
#   bash examples/convert.sh                       # a tiny random Qwen3-MoE, made here; about a minute on a CPU
#   MODEL=models/Qwen3-30B-A3B OUT=converted bash examples/convert.sh
#
# A model too large for one process's patience is shared by ranks:
#   torchrun --nproc-per-node 8 -m megatron_rl convert hf-to-mcore MODEL OUT --parallel.tensor 2 --parallel.expert 8
set -euo pipefail
cd "$(dirname "$0")/.."

OUT=${OUT:-runs/convert}
MODEL=${MODEL:-$OUT/tiny}
PYTHON=${PYTHON:-}
if [ -z "$PYTHON" ]; then
    bash tools/install.sh
    PYTHON=.venv/bin/python
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
mkdir -p "$OUT"

if [ ! -e "$MODEL" ]; then
    "$PYTHON" tools/make_tiny_moe.py --out "$MODEL"
fi
printf '{"tokens": [3, 1, 4, 1, 5, 9, 2, 6]}\n{"tokens": [2, 7, 1, 8]}\n' > "$OUT/prompts.jsonl"

"$PYTHON" -m megatron_rl convert hf-to-mcore "$MODEL" "$OUT/mcore"
# Exits 1, and ends this script, where a tensor differs or a logit is further off than fp32 sums in another order may be.
"$PYTHON" -m megatron_rl convert verify "$MODEL" "$OUT/mcore" --prompts "$OUT/prompts.jsonl"
"$PYTHON" -m megatron_rl convert mcore-to-hf "$OUT/mcore" "$OUT/hf" "$MODEL"
echo "the same model again: $OUT/hf"
