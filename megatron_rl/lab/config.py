"""What `megatron-rl lab measure` is told: the model, how engines sample, and the grid of conditions the trainer scores under."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..config import (
    Config,
    DataConfig,
    Dtype,
    MethodConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimizerConfig,
    ParallelConfig,
    ReplayConfig,
    RewardConfig,
    RolloutConfig,
    TrainConfig,
    positive,
    require,
)

Quantisation = Literal["int8", "fp8"]
SHORT: dict[str, Literal["fp32", "bf16", "fp16"]] = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True)
class LabModelConfig:
    """The policy."""

    path: str | None = None
    """Folder of a Hugging Face checkpoint; null makes a tiny random mixture of experts in <out>/model."""
    logprob_chunk: int = 256
    """Positions whose [chunk, V / TP] logits exist at once."""
    tiny: Mapping[str, Any] = field(default_factory=dict)
    """With path null: sizes of the tiny model, by the fields of `megatron_rl.lab.tiny.TinyModel`."""

    def __post_init__(self) -> None:
        require(self.path is None or not self.tiny, "model.tiny", dict(self.tiny), "has no use where model.path is given; remove one")


@dataclass(frozen=True)
class EngineConfig:
    """One way in which an engine samples. Each dtype starts one server after the other."""

    name: str
    """As the report calls it."""
    dtype: Dtype = "bfloat16"
    """Weights and activations of the server."""
    quantisation: Quantisation | None = None
    """int8: every expert and projection to 8 bits a weight, one scale an output channel. fp8: E4M3, one scale a block of 128 x 128. The
    weights go there and back before the server loads them (weight-only: activations keep dtype). null: as they are."""
    temperature: float = 1.0
    """Of sampling; the trainer divides its logits by it too."""
    top_p: float = 1.0
    """Sample from the likeliest tokens that together have this mass."""
    top_k: int = -1
    """Sample from so many of the likeliest tokens; -1 from all."""
    min_p: float = 0.0
    """Sample from tokens at least this fraction as likely as the likeliest."""
    keep_sets: int = 0
    """Most tokens that truncated sampling leaves at one position; the trainer normalises over the same ones."""

    def __post_init__(self) -> None:
        require(bool(self.name) and "/" not in self.name, "engines: name", self.name, "must be some text without a slash")
        self.over(RolloutConfig())  # its own checks

    def over(self, rollout: RolloutConfig) -> RolloutConfig:
        """`rollout` with this engine's way of sampling."""
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in ("name", "quantisation")}
        return dataclasses.replace(rollout, **own)


@dataclass(frozen=True)
class GridConfig:
    """The conditions under which the trainer scores what an engine sampled."""

    dtypes: tuple[Dtype, ...] = ("float32", "bfloat16")
    """The first is the main one."""
    replay: tuple[Literal["none", "R2", "R3"], ...] = ("none", "R2", "R3")
    """R2 without weight lag is none: it is measured at other lags only."""
    layers: int = 1
    """Replay at every so-manieth MoE layer alone, and at all up to it, for the main dtype; 0 for never."""
    lag_dtypes: Literal["main", "all"] = "main"
    """The dtypes in which other weight versions are scored."""
    layouts: tuple[ParallelConfig, ...] = ()
    """Further layouts over the same ranks, for the main engine and dtype."""
    candidates: int = 0
    """How many of its likeliest tokens an untruncated engine names at each position, to measure how far its logits are from the trainer's;
    at least the vocabulary is exact."""

    def __post_init__(self) -> None:
        for name in ("dtypes", "replay"):
            value = getattr(self, name)
            require(len(value) > 0 and len(set(value)) == len(value), f"grid.{name}", value, "must name at least one, and none twice")
        require(self.layers >= 0, "grid.layers", self.layers, "must not be negative; 0 for no replay of single layers")
        require(self.candidates >= 0, "grid.candidates", self.candidates, "must not be negative")


@dataclass(frozen=True)
class LagConfig:
    """Weight versions of the trainer that the engine has not seen."""

    source: Literal["steps", "perturb", "folders"] = "steps"
    """steps: optimizer steps on the sampled answers. perturb: seeded normal noise on every weight. folders: given checkpoints."""
    lags: tuple[int, ...] = ()
    """How many versions ahead of the engine the trainer is; 0 is always measured."""
    folders: tuple[str, ...] = ()
    """For folders: one Hugging Face checkpoint for each of lags, of the policy's architecture."""
    noise: float = 1e-3
    """For perturb: standard deviation of the noise of one version, as a share of that of each tensor; versions add up."""
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-4)
    """For steps."""
    objective: ObjectiveConfig = ObjectiveConfig()
    """For steps."""
    corrections: tuple[MethodConfig, ...] = ()
    """For steps."""

    def __post_init__(self) -> None:
        ascending = all(a < b for a, b in zip((0, *self.lags), self.lags, strict=False))
        require(ascending, "lag.lags", self.lags, "must be positive and ascending")
        positive("lag.noise", self.noise)
        if self.source == "folders":
            require(
                len(self.folders) == len(self.lags), "lag.folders", self.folders, f"must name one folder for each of lags = {self.lags}"
            )
        else:
            require(not self.folders, "lag.folders", self.folders, "is for lag.source folders; set that, or remove them")


@dataclass(frozen=True)
class LabConfig:
    """Everything `megatron-rl lab measure` needs to know."""

    model: LabModelConfig = LabModelConfig()
    parallel: ParallelConfig = ParallelConfig()
    """The main layout over torchrun's ranks."""
    rollout: RolloutConfig = RolloutConfig(prompts_per_step=16, samples_per_prompt=4)
    """The server, how many prompts and answers, and their length; what `engines` name comes from there."""
    engines: tuple[EngineConfig, ...] = ()
    """Ways to sample; the first is the main one, for which everything is measured. Empty: one, as `rollout` says."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end an answer besides the end of sequence."""
    grid: GridConfig = GridConfig()
    lag: LagConfig = LagConfig()
    data: DataConfig = DataConfig()
    reward: RewardConfig = RewardConfig()
    quantiser: Literal["built-in", "modelopt"] = "built-in"
    """Who rounds int8 weights: this package, or nvidia-modelopt (`pip install 'megatron-rl[lab-quant]'`), to the same numbers."""
    tokens_per_micro_batch: int = 4096
    """Positions of one packed micro-batch."""
    seed: int = 0
    """Of prompts, sampling, noise and steps."""
    threads: int = 1
    """CPU threads a rank; 0 leaves torch's default."""

    def __post_init__(self) -> None:
        names = [one.name for one in self.engines]
        require(len(set(names)) == len(names), "engines", names, "must each have a name of their own")
        dtypes = sorted({one.dtype for one in self.settings})
        require(
            not self.rollout.urls or (len(self.rollout.urls) == 1 and len(dtypes) == 1),
            "rollout.urls",
            self.rollout.urls,
            f"must be one server, of the one dtype of all engines; they have {', '.join(dtypes)}: leave it empty to start one for each",
        )
        require(self.rollout.launch == 1, "rollout.launch", self.rollout.launch, "must be 1: engines are measured one after another")
        self.training(self.main, self.grid.dtypes[0], self.parallel, "model")

    @property
    def settings(self) -> tuple[EngineConfig, ...]:
        """How engines sample; at least one."""
        if self.engines:
            return self.engines
        own = {f.name: getattr(self.rollout, f.name) for f in dataclasses.fields(EngineConfig) if f.name not in ("name", "quantisation")}
        return (EngineConfig(name=SHORT[self.rollout.dtype], **own),)

    @property
    def main(self) -> EngineConfig:
        """The engine setting for which everything is measured."""
        return self.settings[0]

    def training(self, engine: EngineConfig, dtype: Dtype, parallel: ParallelConfig, path: str) -> Config:
        """The run whose actor scores what that engine sampled.

        Raises:
            ValueError: an answer does not fit into a micro-batch.
        """
        return Config(
            model=ModelConfig(path=path, dtype=dtype, logprob_chunk=self.model.logprob_chunk),
            parallel=parallel,
            optimizer=self.lag.optimizer,
            rollout=engine.over(self.rollout),
            objective=self.lag.objective,
            corrections=self.lag.corrections,
            replay=ReplayConfig(mode="none", probe_every=0),
            data=self.data,
            reward=self.reward,
            train=TrainConfig(tokens_per_micro_batch=self.tokens_per_micro_batch, seed=self.seed, threads=self.threads),
        )


def layout_name(parallel: ParallelConfig) -> str:
    """ "one process", or the sizes that are not 1, as "tp2 ep2"."""
    sizes = {
        "tp": parallel.tensor,
        "pp": parallel.pipeline,
        "vp": parallel.virtual_pipeline or 1,
        "cp": parallel.context,
        "ep": parallel.expert,
    }
    return " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "one process"
