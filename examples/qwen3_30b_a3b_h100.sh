#!/usr/bin/env bash
# RL on Qwen3-30B-A3B: trainer nodes and rollout nodes of 8 H100 each, the same entry point as on a laptop.
#
#   bash examples/qwen3_30b_a3b_h100.sh --dry-run                  # prints every command of every role, checks the configuration; no GPU
#   ROLLOUT_NODES="r0 r1" bash examples/qwen3_30b_a3b_h100.sh rollout              # on each rollout node
#   ROLLOUT_NODES="r0 r1" MASTER_ADDR=t0 NODE_RANK=0 bash examples/qwen3_30b_a3b_h100.sh train   # on each trainer node
#
# Arguments after the role go to `megatron-rl train`.
set -euo pipefail

# --- parameters: set them here or in the environment -----------------------------------------------------------------------------
MODEL=${MODEL:-models/Qwen3-30B-A3B}          # Hugging Face folder, at the same path on every node
CONFIG=${CONFIG:-examples/configs/qwen3_30b_a3b_h100.yaml}
RUN_DIR=${RUN_DIR:-runs/qwen3_30b_a3b}        # on storage that every trainer node sees: checkpoints go there
NNODES=${NNODES:-2}                           # trainer nodes
NODE_RANK=${NODE_RANK:-0}                     # of this trainer node; rank 0 must be MASTER_ADDR
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
MASTER_ADDR=${MASTER_ADDR:-trainer-0}         # address of trainer node 0 that every node reaches; weights come from it
MASTER_PORT=${MASTER_PORT:-29500}
ROLLOUT_NODES=${ROLLOUT_NODES:-rollout-0 rollout-1}   # addresses of the rollout nodes
ROLLOUT_TP=${ROLLOUT_TP:-4}                   # GPUs of one server: 4 or 8
ROLLOUT_PORT=${ROLLOUT_PORT:-30000}           # first server of a node; the next ones take the next ports
CONTEXT_LENGTH=${CONTEXT_LENGTH:-9216}        # data.max_prompt_tokens + rollout.max_new_tokens of CONFIG
TRAIN_PYTHON=${TRAIN_PYTHON:-python}          # environment with megatron_rl (pip install '.[gpu]' ./patches)
ROLLOUT_PYTHON=${ROLLOUT_PYTHON:-python}      # environment with sglang 0.5.23 and its own CUDA dependencies
# ---------------------------------------------------------------------------------------------------------------------------------

cd "$(dirname "${BASH_SOURCE[0]}")/.."
SERVERS_PER_NODE=$((GPUS_PER_NODE / ROLLOUT_TP))

server_command() { # index of the server on its node -> SERVER
  # Routed experts on (R3 replays them); prefill in chunks (unchunked, long prompts overrun the buffer of routes). HiCache stays off,
  # its default: rows of prefixes that come from the host would be wrong.
  SERVER=(
    "$ROLLOUT_PYTHON" -m sglang.launch_server --model-path "$MODEL" --host 0.0.0.0 --port $((ROLLOUT_PORT + $1))
    --tp-size "$ROLLOUT_TP" --base-gpu-id $(($1 * ROLLOUT_TP)) --dtype bfloat16 --context-length "$CONTEXT_LENGTH"
    --enable-return-routed-experts --chunked-prefill-size 8192 --max-running-requests 256 --mem-fraction-static 0.8
    --weight-version 0 --random-seed "$1"
  )
}

rollout_urls() { # ["http://r0:30000", ...], as --rollout.urls takes it
  local urls=() node index
  for node in $ROLLOUT_NODES; do
    for ((index = 0; index < SERVERS_PER_NODE; index++)); do urls+=("\"http://$node:$((ROLLOUT_PORT + index))\""); done
  done
  (IFS=,; echo "[${urls[*]}]")
}

train_command() { # node rank, user's arguments -> TRAIN
  local rank=$1
  shift
  # Ranks follow --node-rank, so that rank 0 is on MASTER_ADDR, where --rollout.host sends the servers for weights. (torchrun's elastic
  # --rdzv-backend c10d numbers nodes by the order of their names instead. The store is c10d's TCPStore in both cases.)
  TRAIN=(
    "$TRAIN_PYTHON" -m torch.distributed.run --nnodes "$NNODES" --node-rank "$rank" --nproc-per-node "$GPUS_PER_NODE"
    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT"
    -m megatron_rl train
  )
  config_arguments "$MODEL" "$@"
  TRAIN+=("${ARGUMENTS[@]}")
}

config_arguments() { # model folder, user's arguments -> ARGUMENTS
  local model=$1
  shift
  ARGUMENTS=(--config "$CONFIG" --model.path "$model" --rollout.urls "$(rollout_urls)" --rollout.host "$MASTER_ADDR"
    --rollout.tensor "$ROLLOUT_TP" --logging.dir "$RUN_DIR" "$@")
}

serve() { # every server of this node, until one ends or Ctrl-C
  local index
  PIDS=()
  trap 'kill "${PIDS[@]}" 2>/dev/null || true; wait' EXIT
  mkdir -p "$RUN_DIR/servers"
  for ((index = 0; index < SERVERS_PER_NODE; index++)); do
    server_command "$index"
    "${SERVER[@]}" >"$RUN_DIR/servers/$(hostname)_$index.log" 2>&1 &
    PIDS+=($!)
  done
  wait -n || true
  echo "a server ended; see $RUN_DIR/servers/" >&2
  exit 1
}

dry_run() {
  local node index rank model=$MODEL
  for node in $ROLLOUT_NODES; do
    echo "# rollout node $node"
    for ((index = 0; index < SERVERS_PER_NODE; index++)); do
      server_command "$index"
      quoted "${SERVER[@]}"
    done
  done
  for ((rank = 0; rank < NNODES; rank++)); do
    echo "# trainer node $rank$([ "$rank" -gt 0 ] || echo " ($MASTER_ADDR)")"
    train_command "$rank" "$@"
    printf '%s ' "${TRAIN_ENVIRONMENT[@]}"
    quoted "${TRAIN[@]}"
  done
  if [ ! -d "$MODEL" ]; then
    echo "# $MODEL is not on this machine: its numbers are taken from examples/configs/qwen3_30b_a3b.json"
    model=$(mktemp -d)
    trap "rm -r '$model'" EXIT
    cp examples/configs/qwen3_30b_a3b.json "$model/config.json"
  fi
  echo "# the configuration"
  config_arguments "$model" "$@"
  "$TRAIN_PYTHON" -m megatron_rl check --ranks $((NNODES * GPUS_PER_NODE)) "${ARGUMENTS[@]}"
}

quoted() { # a command as one line that can be pasted
  local word line=""
  for word in "$@"; do line+="$(printf '%q' "$word") "; done
  echo "${line% }"
}

# Megatron overlaps communication with sequence parallelism only in the order of one queue.
TRAIN_ENVIRONMENT=(CUDA_DEVICE_MAX_CONNECTIONS=1)

role=${1:-}
[ $# -eq 0 ] || shift
case $role in
  --dry-run) dry_run "$@" ;;
  rollout) serve ;;
  train)
    train_command "$NODE_RANK" "$@"
    exec env "${TRAIN_ENVIRONMENT[@]}" "${TRAIN[@]}"
    ;;
  *)
    sed -n '2,8p' "examples/${BASH_SOURCE[0]##*/}" >&2
    exit 2
    ;;
esac
