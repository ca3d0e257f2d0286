"""Do real weights survive the way from a dense model to a trained mixture of experts? Checks a folder made by examples/real_weights.sh.

    python tools/check_real_weights.py runs/real_weights

Compares the tensors of the mixture with those of its Megatron checkpoint's export, logits with the dense model's (transformers, fp32),
and greedy answers that real SGLang servers (bf16) give from the mixture, the export and the trained model. Writes check.json and
prints docs/real-weights.md's table; exits 1 unless the export is the same in every bit and answers the same text, and the trained
model answers at all.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from megatron_rl.config import ModelConfig, RolloutConfig
from megatron_rl.convert.activations import TEXTS
from megatron_rl.convert.inspection import compare, describe
from megatron_rl.files import write_json
from megatron_rl.rollout.collector import Sampling, collect
from megatron_rl.rollout.fleet import Fleet
from megatron_rl.types import Prompt

QUESTIONS = (
    "What is the capital of France?",
    "Tom has 3 apples and buys 4 more. How many apples does he have?",
    "Why is the sky blue?",
    "List three animals that live in the sea.",
)
CONTEXT = 256
"""Tokens of question and answer that a server is sized for."""


@dataclass(frozen=True)
class Distance:
    """Of a model's next-token distributions from the dense model's, over the built-in texts."""

    max_logit: float
    """Largest difference of a logit."""
    kl: float
    """Mean KL(dense || model) in nats."""
    perplexity: float


@dataclass(frozen=True)
class Answers:
    """What one server said, and what it cost."""

    texts: list[str]
    start_seconds: float
    tokens_per_second: float
    gib: float
    """Of all its processes."""


@torch.no_grad()
def log_probs(folder: Path) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Logits and token ids of each text, from transformers in fp32."""
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    ids = [torch.tensor(tokenizer(text)["input_ids"]) for text in TEXTS]
    return [model(one[None]).logits[0] for one in ids], ids


def distances(dense: Path, folders: Sequence[Path]) -> tuple[float, dict[str, Distance]]:
    """The dense model's perplexity, and how far each other model is from it."""
    reference, ids = log_probs(dense)
    found = {}
    for folder in folders:
        logits, _ = log_probs(folder)
        pairs = list(zip(reference, logits, strict=True))
        kl = torch.cat([(a.softmax(-1) * (a.log_softmax(-1) - b.log_softmax(-1))).sum(-1) for a, b in pairs])
        largest = max(float((a - b).abs().max()) for a, b in pairs)
        found[folder.name] = Distance(largest, float(kl.mean()), perplexity(logits, ids))
    return perplexity(reference, ids), found


def perplexity(logits: Sequence[torch.Tensor], ids: Sequence[torch.Tensor]) -> float:
    """exp of the mean surprise of all tokens but each text's first."""
    losses = [torch.nn.functional.cross_entropy(a[:-1], b[1:], reduction="none") for a, b in zip(logits, ids, strict=True)]
    return float(torch.cat(losses).mean().exp())


def ask(folder: Path, log_dir: Path, max_new: int) -> Answers:
    """Greedy answers of a fresh bf16 server, one question at a time: bf16 sums depend on what else is in the batch."""
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    turns = [[{"role": "user", "content": question}] for question in QUESTIONS]
    ids = [tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False) for turn in turns]
    asked = [Prompt(id=str(i), tokens=np.array(p, dtype=np.int32), text="", answer="") for i, p in enumerate(ids)]
    sampling = Sampling(temperature=0.0, max_new_tokens=max_new)
    rollout = dataclasses.replace(RolloutConfig(), dtype="bfloat16", max_new_tokens=max_new, max_running_requests=1)
    began = time.monotonic()
    with Fleet.start(rollout, ModelConfig(path=str(folder)), routes=False, log_dir=log_dir, context_length=CONTEXT) as fleet:
        started = time.monotonic()
        said = [collect(fleet, [one], samples=1, sampling=sampling, routes=False, version=None)[0] for one in asked]
        seconds = time.monotonic() - started
        gib = sum(resident(engine.server.process.pid) for engine in fleet.engines if engine.server is not None)
    answers = [one.tokens[len(prompt) :].tolist() for one, prompt in zip(said, ids, strict=True)]
    texts = [tokenizer.decode(answer, skip_special_tokens=True) for answer in answers]
    return Answers(texts, started - began, sum(map(len, answers)) / seconds, gib)


def resident(pid: int) -> float:
    """Memory of a process and all below it, in GiB."""
    process = psutil.Process(pid)
    return float(sum(one.memory_info().rss for one in (process, *process.children(recursive=True)))) / 2**30


def check(run: Path, max_new: int) -> dict[str, Any]:
    """Everything there is to say about the folder."""
    moe, export, trained = run / "moe", run / "export", run / "sft" / "hf"
    perplexity_dense, away = distances(run / "dense", [folder for folder in (run / "copy", moe, trained) if folder.is_dir()])
    answers = {folder: ask(folder, run / "servers" / folder.name, max_new) for folder in (moe, export, trained)}
    stages = [json.loads(line) for line in (run / "stages.jsonl").read_text().splitlines()]
    return {
        "parameters": {folder.name: describe(folder).parameters for folder in (run / "dense", moe)},
        "perplexity_dense": perplexity_dense,
        "distances": {name: dataclasses.asdict(distance) for name, distance in away.items()},
        "tensors": describe(moe).tensors,
        "tensors_changed_by_import_and_export": len(list(compare(export, moe))),
        "tensors_changed_by_the_step": len(list(compare(trained, moe))),
        "same_text": answers[moe].texts == answers[export].texts,
        "answers": {folder.name: dataclasses.asdict(given) for folder, given in answers.items()},
        "stages": stages,
    }


def holds(found: dict[str, Any]) -> bool:
    """What the exit code says."""
    trained = found["answers"]["hf"]["texts"]
    exact = found["tensors_changed_by_import_and_export"] == 0 and found["same_text"]
    return exact and found["tensors_changed_by_the_step"] > 0 and all(text.strip() for text in trained)


def table(found: dict[str, Any]) -> str:
    """Markdown."""
    named = {"copy": "no noise", "moe": "as upcycled", "hf": "after one step"}
    lines = ["| mixture | largest logit difference from dense | KL in nats | perplexity |", "|---|---|---|---|"]
    lines.append(f"| (dense) | | | {found['perplexity_dense']:.3f} |")
    for name, away in found["distances"].items():
        lines.append(f"| {named[name]} | {away['max_logit']:.1e} | {away['kl']:.1e} | {away['perplexity']:.3f} |")
    lines += ["", "| SGLang, bf16 | start | tokens/s | memory | answers |", "|---|---|---|---|---|"]
    titles = {"moe": "before import", "export": "after import and export", "hf": "after one step"}
    for name, given in found["answers"].items():
        texts = "; ".join(f"“{' '.join(text.split())}”" for text in given["texts"])
        lines.append(
            f"| {titles[name]} | {given['start_seconds']:.0f} s | {given['tokens_per_second']:.1f} | {given['gib']:.1f} GiB | {texts} |"
        )
    lines += ["", "| stage | seconds | largest process |", "|---|---|---|"]
    lines += [f"| {stage['name']} | {stage['seconds']:.0f} | {stage['gib']:.1f} GiB |" for stage in found["stages"]]
    changed, step = found["tensors_changed_by_import_and_export"], found["tensors_changed_by_the_step"]
    lines += ["", f"Tensors that import and export changed: {changed} of {found['tensors']}; that the step changed: {step}."]
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("run", type=Path, help="folder that examples/real_weights.sh filled")
    parser.add_argument("--tokens", type=int, default=24, help="longest answer")
    options = parser.parse_args()
    logging.disable_progress_bar()
    found = check(options.run, options.tokens)
    write_json(options.run / "check.json", found)
    print(table(found))
    if not holds(found):
        print("FAILED: the export differs from what was imported, or the trained model does not answer", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
