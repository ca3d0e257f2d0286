"""Do three engines answer alike? Loads a run's Hugging Face export in transformers and in SGLang, both fp32, and compares their
greedy answers with those the Megatron actor gave before the export (<run>/greedy.json). Writes `export_matches` to summary.json;
exits 1 where an answer differs.

usage: python tools/check_export.py runs/quickstart/rl
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from megatron_rl.config import ModelConfig, RolloutConfig
from megatron_rl.files import write_json
from megatron_rl.types import Prompt

Answers = list[list[int]]


def with_transformers(folder: Path, prompts: list[list[int]], max_new: int, stop: int) -> Answers:
    """Greedy answers of transformers, one prompt at a time, so that no padding is involved."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            out = model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_new, eos_token_id=stop
            )
        answers.append(out[0, len(prompt) :].tolist())
    return answers


def with_sglang(folder: Path, prompts: list[list[int]], max_new: int, log_dir: Path) -> Answers:
    """Greedy answers of a fresh fp32 SGLang server."""
    from megatron_rl.rollout.collector import Sampling, collect
    from megatron_rl.rollout.fleet import Fleet

    rollout = dataclasses.replace(RolloutConfig(), dtype="float32", max_new_tokens=max_new, max_running_requests=len(prompts))
    asked = [Prompt(id=str(i), tokens=np.array(p, dtype=np.int32), text="", answer="") for i, p in enumerate(prompts)]
    with Fleet.start(
        rollout, ModelConfig(path=str(folder)), routes=False, log_dir=log_dir, context_length=max(map(len, prompts)) + max_new
    ) as fleet:
        answers = collect(fleet, asked, samples=1, sampling=Sampling(temperature=0.0, max_new_tokens=max_new), routes=False, version=None)
    return [a.tokens[len(p) :].tolist() for a, p in zip(answers, prompts, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\nusage")[0])
    parser.add_argument("run", type=Path, help="folder of a finished run")
    run = parser.parse_args().run
    summary = json.loads((run / "summary.json").read_text())
    folder = Path(summary["export"])
    rows = json.loads((run / "greedy.json").read_text())
    prompts, megatron = [r["prompt"] for r in rows], [r["answer"] for r in rows]
    longest = max(len(a) for a in megatron)
    stop = json.loads((folder / "config.json").read_text())["eos_token_id"]
    with ThreadPoolExecutor() as pool:
        transformers = pool.submit(with_transformers, folder, prompts, longest, stop)
        sglang = with_sglang(folder, prompts, longest, run / "servers" / "export")
        others = {"transformers": transformers.result(), "SGLang": sglang}
    differing = {name: [i for i, (a, b) in enumerate(zip(answers, megatron, strict=True)) if a != b] for name, answers in others.items()}
    for name, where in differing.items():
        print(f"{name}: {len(prompts) - len(where)} of {len(prompts)} greedy answers equal the Megatron actor's")
        for i in where:
            print(f"  prompt {i}: Megatron {megatron[i]}, {name} {others[name][i]}")
    summary["export_matches"] = not any(differing.values())
    write_json(run / "summary.json", summary)
    if any(differing.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
