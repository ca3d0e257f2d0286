"""Runs under torchrun with 2 processes: applies the megatron-core patches, observes the effect of each, and writes what was seen.

    torchrun --nproc-per-node 2 patches_megatron.py OUT.json SCRATCH_FOLDER

It asserts nothing: tests/dist/test_patches_megatron.py knows which values are right.
"""

import json
import logging
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron_rl_patches import active
from megatron_rl_patches.megatron_core import install
from patches_tiny_gpt import Trainer


def refused(call: Any) -> str:
    """Name of the exception `call` raises, or "no error"."""
    try:
        call()
    except (AssertionError, RuntimeError) as error:
        return type(error).__name__
    return "no error"


def observe_device() -> dict[str, Any]:
    from megatron.core.models.common.embeddings.rope_utils import get_pos_emb_on_this_cp_rank
    from megatron.core.transformer.utils import get_default_causal_mask

    mask = get_default_causal_mask(3)  # torch.ones(sq, sq, device="cuda")
    rows = get_pos_emb_on_this_cp_rank(torch.arange(4.0), 0, dist.group.WORLD)  # torch.tensor(device="cpu", pin_memory=True).cuda()
    return {
        "is_available": torch.cuda.is_available(),
        "current_device": str(torch.cuda.current_device()),
        "stream": type(torch.cuda.current_stream()).__name__,
        "mask": mask.tolist(),
        "mask_device": str(mask.device),
        "cp_rows": rows.tolist(),
        "zeros_elsewhere": refused(lambda: torch.zeros(1, device="cuda")),
        "cuda_elsewhere": refused(lambda: torch.zeros(1).cuda()),
    }


def observe_jit() -> dict[str, Any]:
    import megatron.core.jit
    from megatron.core.fusions.fused_bias_swiglu import swiglu

    def f() -> None: ...

    return {
        "jit_fuser_is_identity": megatron.core.jit.jit_fuser(f) is f,
        "fused_function": type(swiglu).__name__,
        "fused_function_is_compiled": hasattr(swiglu, "_torchdynamo_orig_callable"),
        "torch_compile": torch.compile.__module__,
    }


def observe_rng() -> dict[str, Any]:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megatron.core.tensor_parallel.random").addHandler(handler)

    def draws() -> list[list[float]]:
        """Draws outside, inside, inside again, and outside the fork."""
        model_parallel_cuda_manual_seed(1234)
        outside = torch.rand(3).tolist()
        inside = []
        for _ in range(2):
            with get_cuda_rng_tracker().fork():
                inside.append(torch.rand(3).tolist())
        return [outside, *inside, torch.rand(3).tolist()]

    torch.cuda.manual_seed(1234)
    unforked = torch.rand(6).tolist()
    state = torch.cuda.get_rng_state()
    once = torch.rand(3).tolist()
    torch.cuda.set_rng_state(state)
    return {"first": draws(), "again": draws(), "unforked": unforked, "restored": once == torch.rand(3).tolist(), "warnings": records}


def observe_uneven() -> dict[str, Any]:
    """Rank 0 has one row and rank 1 has three; the gradient of the gathered rows is (rank + 1) * [1, 2, 3, 4]."""
    from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region, reduce_scatter_to_sequence_parallel_region

    rank, splits = dist.get_rank(), [1, 3]
    mine = (10.0 * rank + torch.arange(splits[rank])).unsqueeze(1).requires_grad_()
    gathered = gather_from_sequence_parallel_region(mine, group=dist.group.WORLD, output_split_sizes=splits)
    weight = (rank + 1) * torch.arange(1.0, 5.0).unsqueeze(1)
    gathered.backward(weight)
    scattered = reduce_scatter_to_sequence_parallel_region(weight, group=dist.group.WORLD, input_split_sizes=splits)
    assert mine.grad is not None
    even = gather_from_sequence_parallel_region(torch.full((2, 1), float(rank)), group=dist.group.WORLD)
    return {
        "gathered": gathered.flatten().tolist(),
        "grad": mine.grad.flatten().tolist(),
        "scattered": scattered.flatten().tolist(),
        "even": even.flatten().tolist(),
    }


def observe_moe() -> dict[str, Any]:
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    seen: dict[str, Any] = {
        "latent_attention_te": multi_latent_attention.HAVE_TE,
        "te_general_gemm": repr(moe_utils.te_general_gemm),
        "splits": type(token_dispatcher.maybe_move_tensor_to_cpu(torch.tensor([1, 2]), as_numpy=True)).__name__,
        "not_splits": type(moe_utils.maybe_move_tensor_to_cpu(torch.tensor([1, 2]))).__name__,
        "type_elsewhere": torch.zeros(1).type(),
    }
    if any(patch.name == "paged-stash" for patch in active()):
        from megatron.core.transformer.moe import paged_stash

        seen["paged_stash_kernel"] = refused(paged_stash.paged_stash_copy_kernel)
    return seen


def observe_parity() -> dict[str, Any]:
    """One DistributedOptimizer step: in one process, then TP 2 + sequence parallelism + EP 2 from the same weights."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with Trainer(seed=7) as one:
        weights = {name: param.detach().clone() for name, param in one.model.named_parameters()}
        expected = one.step(), {name: param.detach() - weights[name] for name, param in one.model.named_parameters()}
    dist.destroy_process_group()

    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    with Trainer(tp=2, ep=2) as two:
        two.load(weights)
        before = {name: param.detach().clone() for name, param in two.model.named_parameters()}
        observed = two.step()
        error = {}
        for name, param in two.model.named_parameters():
            reference = two.shard(name, param, expected[1])
            error[name] = ((param.detach() - before[name] - reference).norm() / reference.norm()).item()
        marked = [name for name, param in two.model.named_parameters() if getattr(param, "sequence_parallel", False)]
    return {"one": expected[0], "two": observed, "update_error": error, "marked": marked}


def observe_optimizer_checkpoint(folder: Path) -> dict[str, Any]:
    """DP 2: save before step 1 (state only); take 3 steps, save, take a 4th; load into fresh objects and take the 4th again."""
    with Trainer(seed=7) as trainer:
        initial = trainer.parameters()
        trainer.optimizer.state_dict()
        before_step_1 = trainer.steps(), bool(torch.equal(initial, trainer.parameters()))
        for _ in range(3):
            trainer.step()
        trainer.save(folder)
        trainer.step()
        expected = trainer.parameters()
    with Trainer(seed=8) as trainer:
        trainer.load_checkpoint(folder)
        loaded, distinct = trainer.steps(), trainer.step_tensors_are_distinct()
        trainer.step()
        return {
            "steps_before_step_1": before_step_1[0],
            "weights_before_step_1_unchanged": before_step_1[1],
            "steps_loaded": loaded,
            "step_tensors_are_distinct": distinct,
            "steps_after": trainer.steps(),
            "max_difference": (trainer.parameters() - expected).abs().max().item(),
        }


def main(out: Path, scratch: Path) -> None:
    sys.modules["triton"] = None  # type: ignore[assignment]  # as on a machine without triton: importing it raises ImportError
    torch.set_num_threads(1)
    start = time.perf_counter()
    install()
    seconds = time.perf_counter() - start
    install()  # idempotent: a second call changes nothing
    seen: dict[str, Any] = {
        "active": [patch.name for patch in active()],
        "install_seconds": seconds,
        "dynamo_imported": "torch._dynamo" in sys.modules,
    }
    from megatron.core import __version__

    seen["version"] = __version__
    seen["parity"] = observe_parity()
    seen["optimizer_checkpoint"] = observe_optimizer_checkpoint(scratch)
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2, create_gloo_process_groups=False)
    seen |= {"device": observe_device(), "jit": observe_jit(), "rng": observe_rng(), "uneven": observe_uneven(), "moe": observe_moe()}
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, seen)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(ranks))
    parallel_state.destroy_model_parallel()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":  # saving a checkpoint spawns processes that import this file
    main(Path(sys.argv[1]), Path(sys.argv[2]))
