#!/usr/bin/env bash
# The main job on a laptop: a tiny Qwen3-MoE is warm-started by Megatron-core, then trained by reinforcement learning on answers
# that a real SGLang server samples, with the server's own expert routes replayed in the trainer.
#
#   bash examples/quickstart.sh                                  everything, into runs/quickstart
#   OUT=runs/mine SEED=1 STEPS=60 bash examples/quickstart.sh    elsewhere, another seed, fewer steps
set -euo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-runs/quickstart}
SEED=${SEED:-0}
STEPS=${STEPS:-}

bash tools/install.sh
source .venv/bin/activate
# Several processes share few cores: one thread each, and none that waits by spinning.
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE HF_HUB_OFFLINE=1

STAGES=()
stage() { # name, command...
  local name=$1 began=$SECONDS
  shift
  printf '\n== %s\n' "$name"
  "$@"
  STAGES+=("$name=$((SECONDS - began))")
}

SECONDS=0
rm -rf "$OUT"
stage "make a tiny Qwen3-MoE" python tools/make_tiny_moe.py --out "$OUT/base" --seed "$SEED"
stage "make sums to learn" python tools/make_chain_sum.py --out "$OUT/data" --seed "$SEED" \
  --min-terms 3 --max-terms 3 --noise 0.35 --eval 1024
stage "warm start" torchrun --nproc-per-node 2 -m megatron_rl sft --config examples/configs/quickstart_sft.yaml \
  --model.path "$OUT/base" --data.path "$OUT/data/teacher.jsonl" --logging.dir "$OUT/sft" --train.seed "$SEED"
stage "convert to Hugging Face" python -m megatron_rl convert mcore-to-hf "$OUT/sft/checkpoints" "$OUT/warm" "$OUT/base"
stage "reinforcement learning" torchrun --nproc-per-node 2 -m megatron_rl train --config examples/configs/quickstart.yaml \
  --model.path "$OUT/warm" --data.path "$OUT/data/train.jsonl" --data.eval_path "$OUT/data/eval.jsonl" \
  --logging.dir "$OUT" --train.seed "$SEED" ${STEPS:+--train.steps "$STEPS"}
stage "compare three engines" python tools/check_export.py "$OUT"
python tools/quickstart_summary.py "$OUT" "$SECONDS" "${STAGES[@]}"
