"""Run by torchrun: loads tiny checkpoints under each layout asked for, exports them again, scores tokens and takes gradients.

usage: through_megatron.py FOLDER OUT.json '[["qwen2-moe", {"tensor": 2}], ...]'      FOLDER holds one checkpoint of `tiny` a subfolder
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.actor.parallel import Mesh, create_mesh, destroy_mesh, launch_context, prepare_process
from megatron_rl.config import Config, ModelConfig, ParallelConfig

prepare_process(threads=1)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state as ps  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # noqa: E402
from megatron.core.distributed.finalize_model_grads import finalize_model_grads  # noqa: E402
from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from torch import Tensor  # noqa: E402

from megatron_rl.actor.model import PolicyModel, build_chunks, detect_implementation  # noqa: E402
from megatron_rl.convert.bridge import export_hf, load_hf  # noqa: E402
from megatron_rl.convert.families import family_for  # noqa: E402
from megatron_rl.convert.hf import HfReader, read_config  # noqa: E402
from megatron_rl.convert.live import unwrap  # noqa: E402
from megatron_rl.routing.layout import context_positions  # noqa: E402
from tools.families.tiny import LENGTHS  # noqa: E402

Head = Callable[[PolicyModel, Tensor], Any]
"""(chunk of the last stage, its hidden states) -> what the schedule returns."""


def build(folder: Path, parallel: ParallelConfig, mesh: Mesh) -> list[PolicyModel]:
    """Chunks whose every value is NaN, so that nothing passes that was not loaded."""
    hf = read_config(folder)
    config = Config(model=ModelConfig(path=str(folder), dtype="float32"), parallel=parallel)
    _, chunks = build_chunks(config, family_for(hf), hf, mesh, detect_implementation())
    for parameter in (p for chunk in chunks for p in chunk.parameters()):
        parameter.data.fill_(float("nan"))
    return chunks


def packed(lengths: tuple[int, ...], device: torch.device) -> PackedSeqParams:
    """Sequences of these lengths one after the other."""
    ends = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=max(lengths), max_seqlen_kv=max(lengths))


def own_positions(lengths: tuple[int, ...], mesh: Mesh) -> Tensor:
    """Which positions of the pack this rank has: all, without context parallelism."""
    return context_positions(packed(lengths, torch.device("cpu")).cu_seqlens_q, mesh.context_rank, mesh.context_size)


def schedule(chunks: Sequence[Any], tokens_T: Tensor, lengths: tuple[int, ...], mesh: Mesh, head: Head, *, train: bool) -> list[Any]:
    """What `head` makes of the model's hidden states for packed sequences, once a pipeline stage, through the layout's schedule."""

    mine_T = own_positions(lengths, mesh)
    positions_T = torch.cat([torch.arange(length) for length in lengths])
    inputs = {
        "input_ids": tokens_T[mine_T][None].to(mesh.device),
        "position_ids": positions_T[mine_T][None].to(mesh.device),
        "attention_mask": None,
        "packed_seq_params": packed(lengths, mesh.device),
    }

    def forward_step(iterator: Any, model: Any) -> Any:
        next(iterator)
        return model(**inputs), lambda output, non_loss_data=False: head(unwrap(model), output)

    iterators = [iter([None] * mesh.pipeline_size) for _ in chunks]
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=list(chunks) if len(chunks) > 1 else chunks[0],
        num_microbatches=mesh.pipeline_size,
        seq_length=sum(lengths),
        micro_batch_size=1,
        forward_only=not train,
        collect_non_loss_data=not train,
    )


@torch.no_grad()
def logits(chunks: Sequence[PolicyModel], tokens_T: Tensor, lengths: tuple[int, ...], mesh: Mesh) -> Tensor:
    """[T, P] of packed sequences, on every rank."""

    def head(model: PolicyModel, output: Tensor) -> Tensor:
        if model.config.sequence_parallel:
            output = gather_from_sequence_parallel_region(output)
        mine = output.squeeze(1) @ model.output_weight().T
        shards = [torch.empty_like(mine) for _ in range(mesh.tensor_size)]
        dist.all_gather(shards, mine.contiguous(), group=ps.get_tensor_model_parallel_group())
        return torch.cat(shards, -1).cpu()

    got = schedule(chunks, tokens_T, lengths, mesh, head, train=False)
    shares = [(rows, answers[0]) for rows, answers in mesh.gather((own_positions(lengths, mesh), got)) if answers]
    whole = torch.empty(len(tokens_T), shares[0][1].shape[1])
    for rows, answer in shares:
        whole[rows] = answer
    return whole


def max_logit_diff(chunks: Sequence[PolicyModel], folder: Path, mesh: Mesh) -> float:
    """Against transformers' logits."""
    reference = load_file(folder / "reference" / "logits.safetensors")
    got = logits(chunks, reference["tokens"], LENGTHS, mesh)[:, : reference["logits"].shape[1]]
    return float((got - reference["logits"]).abs().max())


def max_gradient_diff(chunks: Sequence[PolicyModel], folder: Path, mesh: Mesh) -> float:
    """Against transformers' gradients, as a share of the largest of each tensor. The chunks hold gradients afterwards."""
    reference = load_file(folder / "reference" / "logits.safetensors")
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=False, overlap_grad_reduce=False)
    core = chunks[0].config
    wrapped = [DistributedDataParallel(core, settings, chunk, disable_bucketing=i > 0) for i, chunk in enumerate(chunks)]
    core.finalize_model_grads_func = lambda models, tokens=None, **options: finalize_model_grads(models, None, **options)

    def head(model: PolicyModel, output: Tensor) -> Any:
        if model.config.sequence_parallel:  # every tensor rank takes the same loss of all positions
            output = gather_from_sequence_parallel_region(output, tensor_parallel_output_grad=False)
        loss = (output.squeeze(1) * factors_TH.to(output.device)).sum()
        return loss, torch.ones((), dtype=torch.int, device=output.device), {}

    factors_TH = reference["factors"][own_positions(LENGTHS, mesh)]
    schedule(wrapped, reference["tokens"], LENGTHS, mesh, head, train=True)
    passes = mesh.data_size * mesh.pipeline_size  # over the same tokens, summed
    for parameter in (p for chunk in chunks for p in chunk.parameters()):
        parameter.data.copy_(parameter.main_grad / passes)
    wanted = HfReader(folder / "gradients")
    diffs = [
        _relative(tensor.cpu(), wanted.tensor(n)) for n, tensor in export_hf(chunks, wanted.config) if tensor is not None and not _frozen(n)
    ]
    return max(mesh.broadcast(diffs))


def _frozen(name: str) -> bool:
    return name.endswith("e_score_correction_bias")


def _relative(got: Tensor, wanted: Tensor) -> float:
    return float((got - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30))


def different(chunks: list[PolicyModel], reader: HfReader) -> list[str]:
    """Tensors that the export lacks, adds or changes; on rank 0."""
    exported = {name: tensor.cpu() for name, tensor in export_hf(chunks, reader.config) if tensor is not None}
    changed = [n for n in exported.keys() & reader.names() if not _equal(exported[n], reader.tensor(n))]
    return sorted(changed + list(exported.keys() ^ reader.names()))


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


def check(folder: Path, parallel: ParallelConfig) -> dict[str, Any]:
    """One checkpoint under one layout."""
    mesh = create_mesh(parallel)
    chunks = build(folder, parallel, mesh)
    load_hf(chunks, folder)
    return {
        "different": different(chunks, HfReader(folder)),
        "max_logit_diff": max_logit_diff(chunks, folder, mesh),
        "max_gradient_diff": max_gradient_diff(chunks, folder, mesh),
    }


def main() -> None:
    folder, out, cases = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
    results = [check(folder / name, ParallelConfig(**layout)) for name, layout in cases]
    if launch_context()[0] == 0:
        out.write_text(json.dumps(results))
    destroy_mesh()


if __name__ == "__main__":
    main()
