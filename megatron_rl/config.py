"""The configuration tree: frozen, typed, checked when it is built. Imports no torch.

Every error names the field, the value and the remedy. What needs a model's own numbers (heads, layers, experts) is checked by
`check_against_model`, still before any process group or server starts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Dtype = Literal["float32", "bfloat16", "float16"]


def require(condition: bool, field_name: str, value: Any, remedy: str) -> None:
    """Raises ValueError, naming field, value and remedy, unless the condition holds."""
    if not condition:
        raise ValueError(f"{field_name}: {value!r} {remedy}")


def positive(field_name: str, value: float) -> None:
    """`require` for what must be above 0."""
    require(value > 0, field_name, value, "must be positive")


@dataclass(frozen=True)
class ModelConfig:
    """The policy."""

    path: str = ""
    """Folder of a Hugging Face checkpoint: config.json, safetensors, tokenizer."""
    dtype: Dtype = "bfloat16"
    """Parameters and activations of the trainer; router logits and log-probs are fp32 in any case."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activation recomputation: nothing, the MoE layers, or every layer."""
    logprob_chunk: int = 256
    """Positions whose [chunk, V / TP] logits exist at once."""

    def __post_init__(self) -> None:
        positive("model.logprob_chunk", self.logprob_chunk)


@dataclass(frozen=True)
class ParallelConfig:
    """How the trainer is laid out over torchrun's ranks; data parallelism is what is left."""

    tensor: int = 1
    """Ranks that share each dense matrix; with more than one, sequence parallelism is on."""
    pipeline: int = 1
    """Stages, each with an equal share of the layers."""
    virtual_pipeline: int | None = None
    """Model chunks a pipeline stage; null for none."""
    expert: int = 1
    """Ranks over which the experts of a layer are spread."""
    expert_tensor: int | None = None
    """Tensor parallelism inside an expert; null takes 1 with expert parallelism, and parallel.tensor without."""
    context: int = 1
    """Ranks that share the positions of a packed micro-batch."""

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline", "expert", "context"):
            require(getattr(self, name) >= 1, f"parallel.{name}", getattr(self, name), "must be at least 1")
        if self.expert_tensor is not None:
            require(self.expert_tensor >= 1, "parallel.expert_tensor", self.expert_tensor, "must be at least 1, or null")
            # Without expert parallelism Megatron reduces expert gradients as if they were dense: any other size is silently wrong.
            require(
                self.expert > 1 or self.expert_tensor == self.tensor,
                "parallel.expert_tensor",
                self.expert_tensor,
                f"must equal parallel.tensor = {self.tensor} when parallel.expert is 1; set it to null",
            )
        if self.virtual_pipeline is not None:
            require(self.virtual_pipeline >= 2, "parallel.virtual_pipeline", self.virtual_pipeline, "must be at least 2, or null for none")
            require(self.pipeline >= 2, "parallel.virtual_pipeline", self.virtual_pipeline, "needs parallel.pipeline >= 2")

    @property
    def expert_tensor_size(self) -> int:
        """Ranks that share one expert's matrices."""
        return self.expert_tensor or (1 if self.expert > 1 else self.tensor)

    @property
    def model_ranks(self) -> int:
        """Ranks that hold one copy of the dense weights: TP x PP x CP."""
        return self.tensor * self.pipeline * self.context

    def check_world_size(self, world_size: int) -> None:
        """Raises ValueError unless the layout fits the number of ranks torchrun started."""
        require(
            world_size % self.model_ranks == 0,
            "parallel",
            f"tensor {self.tensor} x pipeline {self.pipeline} x context {self.context}",
            f"must divide the {world_size} ranks that torchrun started; use --nproc-per-node (x --nnodes) of a multiple of "
            f"{self.model_ranks}",
        )
        expert_ranks = self.expert * self.expert_tensor_size * self.pipeline
        require(
            world_size % expert_ranks == 0,
            "parallel.expert",
            self.expert,
            f"x expert_tensor {self.expert_tensor_size} x pipeline {self.pipeline} must divide the {world_size} ranks",
        )


@dataclass(frozen=True)
class OptimizerConfig:
    """Adam on Megatron's distributed optimizer."""

    lr: float = 1e-6
    """Learning rate after the warm-up."""
    min_lr: float = 0.0
    """Where decay ends."""
    warmup_steps: int = 0
    """Optimizer steps over which lr rises linearly from 0."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """From lr to min_lr over train.steps."""
    weight_decay: float = 0.0
    """Decoupled, as in AdamW."""
    beta1: float = 0.9
    """Adam's decay of the first moment."""
    beta2: float = 0.95
    """Adam's decay of the second moment."""
    eps: float = 1e-8
    """Added to Adam's denominator."""
    clip_grad: float = 1.0
    """Largest global gradient norm; 0 switches clipping off."""

    def __post_init__(self) -> None:
        positive("optimizer.lr", self.lr)
        require(0 <= self.min_lr <= self.lr, "optimizer.min_lr", self.min_lr, f"must be between 0 and lr = {self.lr}")
        require(self.warmup_steps >= 0, "optimizer.warmup_steps", self.warmup_steps, "must not be negative")
        for name in ("beta1", "beta2"):
            require(0 <= getattr(self, name) < 1, f"optimizer.{name}", getattr(self, name), "must be in [0, 1)")


@dataclass(frozen=True)
class RolloutConfig:
    """The SGLang fleet and how it samples."""

    urls: tuple[str, ...] = ()
    """Servers that run already, as http://host:port; empty launches local ones."""
    launch: int = 1
    """How many local servers to launch when urls is empty."""
    host: str = "127.0.0.1"
    """Address launched servers listen on, and where rank 0 offers weights to every server."""
    base_port: int | None = None
    """First port of launched servers; null asks the system for free ones."""
    dtype: Dtype = "bfloat16"
    """Weights and activations of the servers."""
    attention_backend: str | None = None
    """SGLang's --attention-backend; null lets the launcher choose what the machine has."""
    tensor: int = 1
    """Tensor parallelism of each server."""
    max_running_requests: int = 128
    """Requests one server decodes together."""
    max_total_tokens: int | None = None
    """Key-value cache in tokens; null lets SGLang choose (on CPU the launcher sizes it)."""
    mem_fraction: float | None = None
    """SGLang's --mem-fraction-static on GPU."""
    extra_args: tuple[str, ...] = ()
    """Passed to SGLang's server as they are."""
    start_timeout: float = 300.0
    """Seconds to wait for a server to answer."""
    request_timeout: float = 600.0
    """Seconds one generation may take."""
    resume_aborted: int = 3
    """How often an answer that its server cut off (a pause, an abort by hand or by a gateway) is gone on with, from where it was; then
    the run ends."""
    temperature: float = 1.0
    """Of sampling; the trainer divides its logits by it too."""
    top_p: float = 1.0
    """Sample from the likeliest tokens that together have this mass; 1 from all. Anything else needs keep_sets."""
    top_k: int = -1
    """Sample from so many of the likeliest tokens; -1 from all."""
    min_p: float = 0.0
    """Sample from tokens at least this fraction as likely as the likeliest; 0 from all."""
    keep_sets: int = 0
    """Most tokens that truncated sampling leaves at one position, to be returned with each answer: SGLang's own log-probs are of the whole
    distribution. With top_k at most this, no answer is ever refused for a larger set. 0 for untruncated sampling."""
    max_new_tokens: int = 32
    """Longest answer in tokens."""
    samples_per_prompt: int = 8
    """Answers to each prompt: the group of group-relative advantages."""
    prompts_per_step: int = 16
    """Over all data-parallel leaders together."""
    router: str | None = None
    """URL of an SGLang model gateway (smg) in front of urls; answers come through it, weights still go to each server."""

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "samples_per_prompt", "prompts_per_step", "max_running_requests", "tensor"):
            positive(f"rollout.{name}", getattr(self, name))
        require(self.resume_aborted >= 0, "rollout.resume_aborted", self.resume_aborted, "must not be negative; 0 ends the run at once")
        positive("rollout.temperature", self.temperature)
        require(0 < self.top_p <= 1, "rollout.top_p", self.top_p, "must be in (0, 1]")
        require(self.top_k == -1 or self.top_k >= 2, "rollout.top_k", self.top_k, "must be at least 2 (1 is greedy), or -1 for none")
        require(0 <= self.min_p < 1, "rollout.min_p", self.min_p, "must be in [0, 1); 0 for none")
        require(self.keep_sets >= 0, "rollout.keep_sets", self.keep_sets, "must not be negative; 0 for untruncated sampling")
        require(
            not self.truncates or self.keep_sets > 0,
            "rollout.keep_sets",
            self.keep_sets,
            f"must be positive: top_p {self.top_p}, top_k {self.top_k}, min_p {self.min_p} truncate the sampling distribution, but SGLang "
            "returns log-probs of the whole one, so every ratio would be biased; set it to top_k, or to the most that top_p or min_p leave",
        )
        require(
            self.truncates or self.keep_sets == 0,
            "rollout.keep_sets",
            self.keep_sets,
            "has no use: top_p, top_k and min_p leave everything",
        )
        for url in self.urls:
            require(url.startswith(("http://", "https://")), "rollout.urls", url, "must start with http:// or https://")
        if not self.urls:
            require(self.launch >= 1, "rollout.launch", self.launch, "must be at least 1 when rollout.urls is empty")

    @property
    def truncates(self) -> bool:
        """Whether some tokens can never be sampled."""
        return self.top_p < 1 or self.top_k != -1 or self.min_p > 0


@dataclass(frozen=True)
class MethodConfig:
    """A method by name, with its own parameters (`megatron-rl methods show NAME` lists them)."""

    name: str
    """As `megatron-rl methods` lists it."""
    params: Mapping[str, Any] = field(default_factory=dict)
    """Its parameters by name; those left out keep their defaults."""


@dataclass(frozen=True)
class ObjectiveConfig:
    """The loss."""

    name: str = "grpo"
    """As `megatron-rl methods` lists it."""
    params: Mapping[str, Any] = field(default_factory=dict)
    """Its parameters by name; those left out keep their defaults."""
    aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"] | None = None
    """null takes the paper's."""
    entropy: bool = False
    """Whether to log the policy's entropy in nats (costs a little)."""


@dataclass(frozen=True)
class AdvantageConfig:
    """How rewards become advantages."""

    name: str = "group"
    """group, gae or step_advantage; as `megatron-rl methods` lists it."""
    params: Mapping[str, Any] = field(default_factory=dict)
    """Its parameters by name; those left out keep their defaults."""
    reject_truncated: bool = False
    """Answers cut off at rollout.max_new_tokens get advantage 0 and leave their group's statistics."""


@dataclass(frozen=True)
class CriticConfig:
    """The value model of advantage.name gae, and of step_advantage where it learns; the policy's layout, weights of its own."""

    path: str | None = None
    """Checkpoint whose trunk it starts from, of the policy's architecture; null takes model.path. The value head starts at 0."""
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-5)
    """Its own."""
    warmup_steps: int = 0
    """First rollout steps in which only the critic learns."""
    loss: Literal["square", "bce"] = "square"
    """square: half the squared error of the value. bce: binary cross-entropy of sigmoid(value) with a probability of success."""
    clip: float | None = 0.2
    """For square: how far a value may move from the one at the start of the step before the error stops pulling; null for no clip."""

    def __post_init__(self) -> None:
        require(self.warmup_steps >= 0, "critic.warmup_steps", self.warmup_steps, "must not be negative")
        require(self.clip is None or self.clip > 0, "critic.clip", self.clip, "must be positive, or null for no clip")


@dataclass(frozen=True)
class ReferenceConfig:
    """A frozen policy to stay close to, in the policy's layout; loaded only where a method needs it."""

    path: str | None = None
    """Its checkpoint; null for none. model.path keeps the run near its start."""


@dataclass(frozen=True)
class ReplayConfig:
    """Routing replay."""

    mode: Literal["none", "R2", "R3"] = "R3"
    """none: the trainer routes live. R2: it replays its own old-policy routes. R3: it replays the engine's routes."""
    probe_every: int = 20
    """Steps between probes, which score a few answers live, too, so that the log shows what replay removes (docs/routing.md); 0: never."""

    def __post_init__(self) -> None:
        require(self.probe_every >= 0, "replay.probe_every", self.probe_every, "must not be negative; 0 switches probes off")


@dataclass(frozen=True)
class SyncConfig:
    """How new weights reach the servers."""

    mode: Literal["disk", "distributed"] = "distributed"
    """disk: a folder both sides see. distributed: broadcast over gloo (CPU) or NCCL (GPU)."""
    folder: str | None = None
    """For disk; null takes <logging.dir>/sync."""
    bucket_mb: float = 256.0
    """Largest broadcast, in MB of weights."""
    verify: Literal["never", "first", "always"] = "first"
    """When to compare checksums of every tensor with the server's own."""
    timeout: float = 600.0
    """Seconds one update may take."""

    def __post_init__(self) -> None:
        positive("sync.bucket_mb", self.bucket_mb)
        positive("sync.timeout", self.timeout)


@dataclass(frozen=True)
class DataConfig:
    """Where prompts come from."""

    source: Literal["reasoning-gym", "jsonl"] = "reasoning-gym"
    """Made by reasoning-gym, or read from files."""
    task: str = "chain_sum"
    """Name of the reasoning-gym data set."""
    task_args: Mapping[str, Any] = field(default_factory=dict)
    """Its parameters, e.g. {min_terms: 3, max_terms: 4}."""
    path: str | None = None
    """For jsonl: a file with one {"prompt": ..., "answer": ...} a line ({"prompt": ..., "completion": ...} for `sft`)."""
    eval_path: str | None = None
    """For jsonl: the held-out file; null evaluates nothing."""
    size: int = 30000
    """Prompts to make from reasoning-gym."""
    eval_size: int = 512
    """Held-out prompts, made with another seed and never trained on."""
    chat_template: bool = False
    """Wrap the question as a user turn of the tokenizer's chat template."""
    max_prompt_tokens: int = 1024
    """Longest prompt in tokens."""
    step_delimiter: str | None = None
    """Text that ends a step of an answer, such as a line break; tokens then carry their step's number as their turn. null: one turn."""

    def __post_init__(self) -> None:
        for name in ("size", "eval_size", "max_prompt_tokens"):
            positive(f"data.{name}", getattr(self, name))
        if self.source == "jsonl":
            require(self.path is not None, "data.path", self.path, "must name a .jsonl file when data.source is jsonl")
        for name in ("path", "eval_path"):
            value = getattr(self, name)
            require(value is None or Path(value).is_file(), f"data.{name}", value, "is not a file; check the path")


@dataclass(frozen=True)
class RewardConfig:
    """What an answer is worth."""

    verifier: Literal["final-answer", "math-verify", "reasoning-gym"] = "final-answer"
    """final-answer compares the text after the last marker exactly; math-verify compares mathematically; reasoning-gym asks the task."""
    marker: str = "#"
    """For final-answer."""
    timeout: float = 5.0
    """Seconds a verifier may take for one answer."""


@dataclass(frozen=True)
class LoggingConfig:
    """What is written while it runs."""

    dir: str = "runs/default"
    """metrics.jsonl, tensorboard/, report.html and checkpoints/ go there."""
    tensorboard: bool = True
    """Write TensorBoard files too."""
    progress: Literal["auto", "rich", "plain", "none"] = "auto"
    """auto shows rich panels on a terminal and plain lines elsewhere."""


@dataclass(frozen=True)
class CheckpointConfig:
    """Megatron distributed checkpoints: weights, optimizer, RNG, data order, step, weight version."""

    every: int = 0
    """Steps between checkpoints; 0 saves only at the end."""
    keep: int = 2
    """How many to keep; older ones go after a newer one is whole."""
    resume: bool = True
    """Continue from the newest whole checkpoint under logging.dir, if there is one."""
    save_optimizer: bool = True
    """Save the optimizer's state too; without it a resumed run starts Adam anew."""
    export: bool = True
    """Also write the final weights in Hugging Face format, to <logging.dir>/hf."""

    def __post_init__(self) -> None:
        require(self.every >= 0, "checkpoint.every", self.every, "must not be negative; 0 saves only at the end")
        require(self.keep >= 1, "checkpoint.keep", self.keep, "must be at least 1")


@dataclass(frozen=True)
class RecordConfig:
    """What a run saw, kept to be taken apart and trained on again (`megatron-rl lab replay`, `lab inspect`; docs/store.md)."""

    enabled: bool = True
    """Record every answer with its routes, advantages and log-probs below <logging.dir>/record."""
    max_gb: float = 4.0
    """Disk it may take, in 10^9 bytes over all data-parallel leaders. Beyond it the oldest steps go."""

    def __post_init__(self) -> None:
        positive("record.max_gb", self.max_gb)


@dataclass(frozen=True)
class TrainConfig:
    """The loop."""

    steps: int = 100
    """Rollout steps; optimizer steps for `sft`."""
    batch_size: int = 64
    """Sequences an optimizer step, for `sft` only."""
    mini_batches: int = 1
    """Optimizer steps a rollout step; more than one needs old log-probs, which are then computed."""
    old_policy: Literal["recomputed", "behaviour"] = "recomputed"
    """Where old log-probs come from: a trainer forward at the start of the step, or the engine's (bypass: old is mu)."""
    tokens_per_micro_batch: int = 4096
    """Positions of one packed micro-batch on one data-parallel rank."""
    seed: int = 0
    """Of initialisation, data order and sampling."""
    threads: int = 1
    """CPU threads a rank; 0 leaves torch's default."""
    eval_every: int = 0
    """Steps between evaluations; 0 evaluates only before and after."""

    def __post_init__(self) -> None:
        for name in ("steps", "mini_batches", "batch_size"):
            positive(f"train.{name}", getattr(self, name))
        require(self.tokens_per_micro_batch >= 8, "train.tokens_per_micro_batch", self.tokens_per_micro_batch, "must be at least 8")
        require(self.threads >= 0, "train.threads", self.threads, "must not be negative; 0 leaves torch's default")


@dataclass(frozen=True)
class Config:
    """Everything a run needs to know."""

    model: ModelConfig = ModelConfig()
    parallel: ParallelConfig = ParallelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    rollout: RolloutConfig = RolloutConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    corrections: tuple[MethodConfig, ...] = ()
    """Corrections and penalties stacked on the objective, in order; each {name: ..., params: {...}}."""
    methods: tuple[MethodConfig, ...] = ()
    """Vocabulary restrictions (dvp, keep_sets) and methods that act on data, steps or the learning rate (popo, mipu, length_lr ...)."""
    advantage: AdvantageConfig = AdvantageConfig()
    critic: CriticConfig = CriticConfig()
    reference: ReferenceConfig = ReferenceConfig()
    replay: ReplayConfig = ReplayConfig()
    sync: SyncConfig = SyncConfig()
    data: DataConfig = DataConfig()
    reward: RewardConfig = RewardConfig()
    train: TrainConfig = TrainConfig()
    record: RecordConfig = RecordConfig()
    logging: LoggingConfig = LoggingConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    def __post_init__(self) -> None:
        longest = self.data.max_prompt_tokens + self.rollout.max_new_tokens
        require(
            longest <= self.train.tokens_per_micro_batch,
            "train.tokens_per_micro_batch",
            self.train.tokens_per_micro_batch,
            f"cannot hold one answer: data.max_prompt_tokens + rollout.max_new_tokens = {longest}; raise it or lower those",
        )
        require(
            self.replay.mode != "R2" or self.train.old_policy == "recomputed",
            "train.old_policy",
            self.train.old_policy,
            "leaves R2 without the old-policy forward whose routes it replays; set it to recomputed, or replay.mode to R3 or none",
        )


@dataclass(frozen=True)
class ModelFacts:
    """The numbers of a checkpoint's config.json that a layout must divide."""

    architecture: str
    layers: int
    heads: int
    kv_heads: int
    experts: int
    """0 for a dense model."""
    vocab_size: int
    max_positions: int

    @property
    def is_moe(self) -> bool:
        """Whether there is anything to route."""
        return self.experts > 0


def read_model_facts(path: str) -> ModelFacts:
    """Reads `path`/config.json.

    Raises:
        ValueError: the folder, the file or a field is missing.
    """
    folder = Path(path)
    require(bool(path) and folder.is_dir(), "model.path", path, "is not a folder; give one with a Hugging Face checkpoint")
    file = folder / "config.json"
    require(file.is_file(), "model.path", path, "has no config.json; give a folder in Hugging Face format")
    raw = json.loads(file.read_text())
    try:
        return ModelFacts(
            architecture=(raw.get("architectures") or ["unknown"])[0],
            layers=raw["num_hidden_layers"],
            heads=raw["num_attention_heads"],
            kv_heads=raw.get("num_key_value_heads") or raw["num_attention_heads"],
            experts=raw.get("num_experts") or raw.get("num_local_experts") or raw.get("n_routed_experts") or 0,
            vocab_size=raw["vocab_size"],
            max_positions=raw.get("max_position_embeddings", 1 << 30),
        )
    except KeyError as missing:
        raise ValueError(f"model.path: {path!r}: config.json has no {missing}; is it a causal language model?") from missing


def check_against_model(config: Config, facts: ModelFacts) -> None:
    """Raises ValueError where the layout or the lengths cannot work for this model."""
    p = config.parallel
    require(facts.heads % p.tensor == 0, "parallel.tensor", p.tensor, f"must divide the model's {facts.heads} attention heads")
    require(facts.kv_heads % p.tensor == 0, "parallel.tensor", p.tensor, f"must divide the model's {facts.kv_heads} key-value heads")
    stages = p.pipeline * (p.virtual_pipeline or 1)
    name = "parallel.pipeline" if stages == p.pipeline else "parallel.pipeline x parallel.virtual_pipeline"
    require(facts.layers % stages == 0, name, stages, f"must divide the model's {facts.layers} layers")
    if facts.is_moe:
        require(facts.experts % p.expert == 0, "parallel.expert", p.expert, f"must divide the model's {facts.experts} experts")
    else:
        require(p.expert == 1, "parallel.expert", p.expert, "must be 1: the model is dense")
        require(config.replay.mode == "none", "replay.mode", config.replay.mode, "must be none: the model is dense and routes nothing")
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    require(
        longest <= facts.max_positions,
        "data.max_prompt_tokens + rollout.max_new_tokens",
        longest,
        f"exceeds the model's {facts.max_positions} positions",
    )
    unit = 2 * p.context * p.tensor if p.context > 1 else p.tensor
    require(
        config.train.tokens_per_micro_batch % unit == 0,
        "train.tokens_per_micro_batch",
        config.train.tokens_per_micro_batch,
        f"must be a multiple of {unit} (tensor {p.tensor}, context {p.context}), or positions cannot be split evenly",
    )
