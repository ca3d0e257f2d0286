#!/usr/bin/env bash
# Real pretrained weights from a package index, all the way round: SmolLM2-135M -> mixture of 4 experts -> Megatron at tensor
# parallel 2 -> one training step -> Hugging Face -> SGLang, which has to answer the same text before and after.
#
#   bash examples/real_weights.sh                       everything, into runs/real_weights: 13 GB of disk, 13 GB of memory
#   OUT=runs/mine bash examples/real_weights.sh         elsewhere
#   DENSE=models/mine bash examples/real_weights.sh     another dense Llama, instead of downloading one
#
# What it prints and what it means: docs/real-weights.md.
set -euo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-runs/real_weights}
PYTHON=${PYTHON:-}

if [[ -z $PYTHON ]]; then
  bash tools/install.sh
  PYTHON=.venv/bin/python
  "$PYTHON" -m pip --disable-pip-version-check -qq install -e ".[real-weights]"
fi
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE HF_HUB_OFFLINE=1

rm -rf "$OUT"
mkdir -p "$OUT"
stage() { "$PYTHON" tools/stage.py "$OUT/stages.jsonl" "$@"; }
RANKS=("$PYTHON" -m torch.distributed.run --nproc-per-node 2 -m megatron_rl)

if [[ -n ${DENSE:-} ]]; then
  ln -s "$(realpath "$DENSE")" "$OUT/dense"
else
  stage "fetch SmolLM2-135M" "$PYTHON" tools/fetch_smollm2.py --out "$OUT/dense"
fi
# 3 key-value heads cannot be divided among two ranks; a fourth, of zeros, changes nothing else.
UPCYCLE=("$PYTHON" -m megatron_rl convert upcycle "$OUT/dense")
stage "upcycle, identical experts" "${UPCYCLE[@]}" "$OUT/copy" --experts 4 --kv_heads 4
stage "upcycle, noise 0.1" "${UPCYCLE[@]}" "$OUT/moe" --experts 4 --kv_heads 4 --noise 0.1
stage "import at tensor parallel 2" "${RANKS[@]}" convert hf-to-mcore "$OUT/moe" "$OUT/sft/checkpoints" --parallel.tensor 2
stage "export" "$PYTHON" -m megatron_rl convert mcore-to-hf "$OUT/sft/checkpoints" "$OUT/export" "$OUT/moe"
stage "one step at tensor parallel 2" "${RANKS[@]}" sft --config examples/configs/real_weights_sft.yaml \
  --model.path "$OUT/moe" --logging.dir "$OUT/sft"
"$PYTHON" tools/check_real_weights.py "$OUT"
