"""What goes into and comes out of the feed-forward layers of a dense model, measured on texts by transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TOKENS = 512
"""Of a text that are read."""

TEXTS = (
    "The history of the Roman Empire began with the founding of the city of Rome. Over several centuries its power spread across the sea.",
    "Question: Tom has 3 apples and buys 4 more. How many apples does he have?\nAnswer: Tom has 3 + 4 = 7 apples. The answer is 7.",
    'def add(a, b):\n    """Return the sum."""\n    return a + b\n\nfor i in range(10):\n    print(add(i, 2 * i))\n',
    "Photosynthesis is the process by which green plants use sunlight to make food from carbon dioxide and water.",
    "The sea is wide, the sea is blue,\nit sings a song for me and you.\nIt tells of ships and golden sands.",
    "Let x = 12 and y = 30. Then x + y = 42, x * y = 360, and y - x = 18. Therefore the ratio y / x is 2.5.",
)
"""Prose, a sum, code, science, verse and algebra, where the user gives none."""


@dataclass(frozen=True)
class LayerActivations:
    """One feed-forward layer."""

    largest: float
    """Largest magnitude that it adds to the residual stream."""
    inputs_TH: Tensor
    """fp32: its inputs, without each text's first token, which most models turn into a sink unlike any other token."""


def read_texts(file: str | Path) -> list[str]:
    """One text a line.

    Raises:
        ValueError: the file is missing or empty.
    """
    if not Path(file).is_file():
        raise ValueError(f"prompts: {str(file)!r} is no file; give a text file with one prompt a line")
    texts = [line for line in Path(file).read_text().splitlines() if line.strip()]
    if not texts:
        raise ValueError(f"prompts: {str(file)!r} is empty; give a text file with one prompt a line")
    return texts


@torch.no_grad()
def measure(folder: str | Path, texts: Sequence[str] = TEXTS) -> list[LayerActivations]:
    """Runs the dense Llama or Qwen2 of `folder` over texts, one at a time. The model is in memory as a whole, in fp32.

    Raises:
        ValueError: the folder has no tokenizer, or the texts are too short.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer  # seconds to import

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder}: has no tokenizer to measure with; add one, or pass --router norm --keep_above null") from error
    ids = [tokenizer(text)["input_ids"][:TOKENS] for text in texts]
    if sum(len(one) - 1 for one in ids) < 2:
        raise ValueError("prompts: the texts have too few tokens after their first; give longer ones")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    layers = [layer.mlp for layer in model.model.layers]
    inputs: list[list[Tensor]] = [[] for _ in layers]
    largest = [0.0] * len(layers)

    def watch(number: int) -> Any:
        def hook(module: Any, arguments: tuple[Tensor, ...], output: Tensor) -> None:
            inputs[number].append(arguments[0][0, 1:])
            largest[number] = max(largest[number], float(output.abs().max()))

        return hook

    for number, layer in enumerate(layers):
        layer.register_forward_hook(watch(number))
    for one in ids:
        model(torch.tensor([one]))
    return [LayerActivations(most, torch.cat(seen)) for most, seen in zip(largest, inputs, strict=True)]
