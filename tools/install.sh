#!/usr/bin/env bash
# Sets up everything megatron_rl needs in .venv; a second call finds it done and returns at once.
#
#   bash tools/install.sh          # on a machine without a GPU one environment holds both engines
#   bash tools/install.sh --cpu    # the same on a machine that has one
#
# PYTHON           the interpreter to build on; python3.11 otherwise
# TORCH_INDEX_URL  an index that has PyTorch's CPU build; the default build works too, it is only larger
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"

python=${PYTHON:-python3.11}
venv=$root/.venv
stamp=$venv/installed
torch=2.13.0
sglang=0.5.23
newer_megatron=0.19.2   # tests run the patches against it too, from a folder on the path
overlay=$root/.overlays/megatron-core-$newer_megatron

say() { printf '[install] %s\n' "$*"; }
fail() { printf '[install] %s\n' "$*" >&2; exit 1; }
# --no-warn-conflicts: SGLang's own pins, which want CUDA, would be listed at every step.
pip_install() { "$venv/bin/python" -m pip --disable-pip-version-check -qq install --no-warn-conflicts --root-user-action=ignore "$@"; }

device=cpu
if [[ ${1:-} != --cpu ]] && nvidia-smi -L >/dev/null 2>&1; then device=cuda; fi

fingerprint() {
    { printf '%s\n' "$root" "$device"; cat tools/install.sh setup.py patches/pyproject.toml patches/requirements-sglang-cpu.txt; } | sha256sum | cut -d' ' -f1
}

make_venv() {
    if [[ -x $venv/bin/python ]]; then say ".venv is there"; return; fi
    command -v "$python" >/dev/null || fail "$python is missing; install Python 3.11 with its venv module, or set PYTHON to one"
    say "make .venv with $("$python" --version)"
    "$python" -m venv "$venv" || fail "$python has no venv module; on Debian and Ubuntu: apt-get install python3.11-venv"
    pip_install --upgrade pip "setuptools>=77" wheel
}

install_cpu() {
    say "torch $torch"
    pip_install "torch==$torch" ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"}
    say "SGLang $sglang and what it needs on a CPU"   # its own pins want a CUDA build of torch
    pip_install --no-deps "sglang==$sglang"
    pip_install -r patches/requirements-sglang-cpu.txt
    say "patches and megatron_rl with Megatron-core, tests and linters"
    pip_install -e ./patches -e ".[cpu,dev]"
    if [[ -d $overlay/megatron/core ]]; then say "Megatron-core $newer_megatron for the tests is there"; return; fi
    say "Megatron-core $newer_megatron for the tests, in .overlays/"
    rm -rf "$overlay"
    pip_install --ignore-requires-python --no-deps --target "$overlay" "megatron-core==$newer_megatron"
}

install_cuda() {
    say "torch, Megatron-core and Transformer Engine for CUDA"
    pip_install "torch>=2.8,<2.15" pybind11 ninja packaging
    # Transformer Engine compiles against the torch that is there.
    pip_install --no-build-isolation -e ./patches -e ".[gpu,dev]"
    say "SGLang brings its own CUDA torch, so it takes an environment of its own, here or on the nodes that serve:"
    say "    $python -m venv .venv-sglang && .venv-sglang/bin/pip install sglang==$sglang smg==1.13.0"
    say "    .venv-sglang/bin/python -m sglang.launch_server --model-path MODEL --enable-return-routed-experts --host 0.0.0.0 --port 30000"
    say "Give the servers as rollout.urls. Keep HiCache off and chunked prefill on: replayed routes depend on both."
}

[[ -f patches/requirements-sglang-cpu.txt ]] || fail "patches/requirements-sglang-cpu.txt is missing; the checkout is not whole"
wanted=$(fingerprint)   # before installing: an input that changes meanwhile is to be noticed next time
if [[ -f $stamp && $(<"$stamp") == "$wanted" ]]; then
    say "everything is installed in .venv"
    exit 0
fi
make_venv
"install_$device"
printf '%s\n' "$wanted" >"$stamp"
say "done in $SECONDS s; next: bash examples/quickstart.sh, or bash tools/test.sh"
