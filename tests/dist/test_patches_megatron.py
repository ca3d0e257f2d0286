"""The megatron-core patches at work, on both supported versions: two gloo processes a version, started once, observed by every test."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.dist

REPO = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).parent / "workers" / "patches_megatron.py"
OVERLAY = REPO / ".overlays" / "megatron-core-0.19.2"
VERSIONS = ("0.16.1", "0.19.2")

# In the order they must be applied: torch before megatron.core is imported (by jit-fuser), its modules afterwards.
EXPECTED = {
    "0.16.1": [
        *("cuda-facade", "cuda-literals", "cuda-seed", "optimizer-dtypes", "jit-fuser"),
        *("rng-fork", "alltoall-splits", "te-general-gemm", "latent-attention-te", "uneven-collectives", "optimizer-checkpoint"),
    ],
    "0.19.2": [
        *("cuda-facade", "cuda-literals", "cuda-seed", "optimizer-dtypes", "paged-stash", "jit-fuser"),
        *("rng-fork", "alltoall-splits", "uneven-collectives", "optimizer-checkpoint"),
    ],
}

Ranks = list[dict[str, Any]]


def run_two_processes(environment: dict[str, str], out: Path, scratch: Path) -> Ranks:
    """What the worker saw, rank by rank."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(WORKER), str(out), str(scratch)]
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=180)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, output[-8000:]
    ranks: Ranks = json.loads(out.read_text())
    return ranks


@pytest.fixture(scope="session", params=VERSIONS)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """Observations of both ranks on one version of megatron-core."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    if request.param == "0.19.2":
        if not OVERLAY.is_dir():
            pytest.skip(f"no {OVERLAY.relative_to(REPO)}: tools/install.sh puts megatron-core 0.19.2 there")
        environment["PYTHONPATH"] = os.pathsep.join([str(OVERLAY), *filter(None, [os.environ.get("PYTHONPATH")])])
    scratch = tmp_path_factory.mktemp("checkpoint")
    ranks = run_two_processes(environment, tmp_path_factory.mktemp("seen") / "ranks.json", scratch)
    assert len(ranks) == 2 and all(seen["version"].partition("+")[0] == request.param for seen in ranks)
    return ranks


@pytest.fixture(params=(0, 1))
def seen(request: pytest.FixtureRequest, ranks: Ranks) -> dict[str, Any]:
    """Observations of one rank."""
    return {**ranks[request.param], "rank": request.param}


def test_the_patches_of_the_version_are_applied_in_order_and_once(seen: dict[str, Any]) -> None:
    # The worker calls install() twice; a name would be listed once in any case, so the effects below tell whether twice is harmless.
    assert seen["active"] == EXPECTED[seen["version"].partition("+")[0]]


def test_cuda_facade_answers_with_the_cpu_and_does_not_claim_cuda(seen: dict[str, Any]) -> None:
    assert seen["device"]["current_device"] == "cpu"
    assert seen["device"]["stream"] == "CpuStream"
    assert seen["device"]["is_available"] is False


def test_cuda_literals_mean_the_cpu_in_megatron_only(seen: dict[str, Any]) -> None:
    device = seen["device"]
    assert device["mask_device"] == "cpu"
    assert device["mask"] == [[False, True, True], [False, False, True], [False, False, False]]  # causal: True is masked
    # Zig-zag: of 4 rows, rank r of 2 gets rows r and 3 - r. The indices go through pin_memory=True and .cuda().
    assert device["cp_rows"] == [seen["rank"], 3 - seen["rank"]]
    # This test's own module is not Megatron, so torch refuses as it does without patches.
    assert device["zeros_elsewhere"] == device["cuda_elsewhere"] == "AssertionError"


def test_cuda_seed_is_the_cpu_seed(seen: dict[str, Any]) -> None:
    # torch.manual_seed(1234); torch.rand(6) starts with these; torch documents the CPU generator as reproducible.
    assert seen["rng"]["unforked"][:3] == pytest.approx([0.0290, 0.4019, 0.2598], abs=1e-4)
    assert seen["rng"]["restored"]


def test_rng_fork_uses_a_stream_of_its_own_and_restores(ranks: Ranks) -> None:
    for seen in ranks:
        outside, inside, inside_later, outside_later = seen["rng"]["first"]
        # The default stream goes on after two forks as if they had not been: draws 4 to 6 of an unforked run.
        assert outside + outside_later == seen["rng"]["unforked"]
        assert inside != inside_later  # the forked stream moves on from where it was left
        assert inside != outside and inside != outside_later
        assert seen["rng"]["again"] == seen["rng"]["first"]  # seeding restarts both
        assert seen["rng"]["warnings"] == []  # Megatron's "CPU RNG state changed" warning is meaningless here
    # Megatron seeds the model-parallel stream by tensor-parallel rank and the default stream alike on all of them.
    assert ranks[0]["rng"]["first"][0] == ranks[1]["rng"]["first"][0]
    assert ranks[0]["rng"]["first"][1] != ranks[1]["rng"]["first"][1]


def test_optimizer_dtypes_are_cuda_names_for_megatrons_optimizer_only(seen: dict[str, Any]) -> None:
    # That the optimizer was built at all shows the renaming; everybody else still reads torch's name.
    assert seen["parity"]["one"]["grad_norm"] > 0
    assert seen["moe"]["type_elsewhere"] == "torch.FloatTensor"


def test_jit_fuser_leaves_functions_alone_and_torch_compile_as_it_was(seen: dict[str, Any]) -> None:
    jit = seen["jit"]
    assert jit["jit_fuser_is_identity"] and jit["fused_function"] == "function" and not jit["fused_function_is_compiled"]
    assert jit["torch_compile"] == "torch"
    assert not seen["dynamo_imported"]  # what makes the import slow; torch.compile(f) imports it even if f is never called


def test_alltoall_splits_are_numpy_and_other_tensors_stay(seen: dict[str, Any]) -> None:
    assert seen["moe"]["splits"] == "ndarray"
    assert seen["moe"]["not_splits"] == "Tensor"


def test_te_general_gemm_is_bound(seen: dict[str, Any]) -> None:
    assert seen["moe"]["te_general_gemm"] == "None"  # 0.16 by the patch, 0.19 by itself; the router in the model below reads it


def test_latent_attention_knows_that_te_is_missing(seen: dict[str, Any]) -> None:
    assert seen["moe"]["latent_attention_te"] is False  # 0.16 by the patch, 0.19 by itself


def test_paged_stash_stands_in_without_triton(seen: dict[str, Any]) -> None:
    # The worker hides triton before anything is imported, so that GPTModel was built shows the stand-in at work.
    if "paged-stash" in seen["active"]:
        assert seen["moe"]["paged_stash_kernel"] == "RuntimeError"


def test_uneven_collectives_gather_and_scatter_by_rank(seen: dict[str, Any]) -> None:
    uneven, rank = seen["uneven"], seen["rank"]
    assert uneven["gathered"] == [0.0, 10.0, 11.0, 12.0]  # rank 0's one row, then rank 1's three
    # Both gradients, [1 2 3 4] and twice that, sum to [3 6 9 12]; rank 0 owns row 0, rank 1 the rest.
    assert uneven["grad"] == ([3.0], [6.0, 9.0, 12.0])[rank]
    assert uneven["scattered"] == uneven["grad"]  # the backward of a gather is that reduce-scatter
    assert uneven["even"] == [0.0, 0.0, 1.0, 1.0]  # calls without split sizes are Megatron's own


def test_tp2_sp_ep2_step_equals_one_process(seen: dict[str, Any]) -> None:
    # Same weights, same tokens, other layout: only the order of fp32 sums differs, 1e-7 an operation. 1e-5 leaves room for
    # their accumulation and is far below what a wrong or missing gradient reduction does (a factor of 2).
    one, two = seen["parity"]["one"], seen["parity"]["two"]
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-5)
    assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)
    assert max(seen["parity"]["update_error"].values()) < 1e-5


def test_sp_rmsnorm_marks_its_weight(seen: dict[str, Any]) -> None:
    # 2 layers x (input, pre-MLP, q and k norms) and the final norm. Unmarked, their gradients would miss the other rank's half.
    marked = [name for name in seen["parity"]["marked"] if "norm" in name]
    assert len(marked) == 2 * 4 + 1


def test_optimizer_checkpoint_restores_adam_state_and_a_step_of_its_own_for_each_parameter(seen: dict[str, Any]) -> None:
    checkpoint = seen["optimizer_checkpoint"]
    assert checkpoint["steps_before_step_1"] == [0.0]
    assert checkpoint["weights_before_step_1_unchanged"]  # no dummy step, which would decay the weights
    assert checkpoint["steps_loaded"] == [3.0]
    assert checkpoint["step_tensors_are_distinct"]
    assert checkpoint["steps_after"] == [4.0]  # a shared tensor would have been incremented once a parameter
    assert checkpoint["max_difference"] == 0.0  # the 4th step after a load is the 4th step without one, bit for bit
