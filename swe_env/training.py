"""What a training is asked for: a TOML file, read and refused before anything is started.

Plain data, without torch: `trainer` is handed these, `swe-env train` makes them.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from agents.chat import Family
from agents.loop import Budget
from agents.policy import Sampling
from sandboxes.backends import Backend
from swe_env.rundir import RunError

Tracker = Literal["trackio", "wandb", "tensorboard"]


class TrainConfig(BaseModel):
    """Everything that `swe-env train` can be told, but where the run is to be kept."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    model: str
    """Model directory to begin with, or `tiny:glm`, `tiny:qwen`, `tiny:llama`: a small one, made anew."""
    family: Family | None = None
    prompts: str = "default"
    seed: int = 0
    """Of a tiny model's weights, of the order of demonstrations and of tasks."""
    steps: int = Field(ge=1)
    """Optimiser steps of reinforcement learning."""
    sandbox: Backend = "auto"
    cold_start: ColdStart | None = None
    """None: the model is trained on as it is."""
    rollout: RolloutConfig
    asynchronous: AsyncConfig = Field(default_factory=lambda: AsyncConfig(), alias="async")
    advantage: Penalty = Field(default_factory=lambda: Penalty())
    loss: LossConfig = Field(default_factory=lambda: Ipo())
    optimiser: OptimiserConfig = Field(default_factory=lambda: OptimiserConfig())
    trainer: TrainerConfig = Field(default_factory=lambda: TrainerConfig())
    server: ServerConfig = Field(default_factory=lambda: ServerConfig())
    evaluation: EvaluationConfig | None = None
    trackers: list[Tracker] = []
    """Where metrics go beside `metrics.jsonl`; each is an extra to be installed."""

    @model_validator(mode="after")
    def _fits(self) -> TrainConfig:
        if self.rollout.sampling.temperature == 0:
            raise ValueError(
                "rollout.sampling.temperature is 0: greedy tokens have no probabilities to train on"
            )
        if self.rollout.budget.context_tokens > self.trainer.micro_batch_tokens:
            raise ValueError(
                f"an episode may have {self.rollout.budget.context_tokens} tokens "
                f"(rollout.budget.context_tokens), a micro-batch only {self.trainer.micro_batch_tokens} "
                "(trainer.micro_batch_tokens): raise the one or lower the other"
            )
        if self.optimiser.total_steps not in (None, self.steps):
            raise ValueError("optimiser.total_steps is not steps: leave it out")
        return self

    def is_evaluated(self, version: int) -> bool:
        """Whether held-out tasks are played by the weights after `version` steps."""
        return self.evaluation is not None and (version % self.evaluation.every == 0 or version == self.steps)

    def is_kept(self, version: int) -> bool:
        """Whether weights that go to the server by NCCL are written to disk as well."""
        return self.is_evaluated(version) or version == self.steps

    @property
    def schedule(self) -> OptimiserConfig:
        """The optimiser's, over all steps."""
        return self.optimiser.model_copy(update={"total_steps": self.steps})


class _Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Place(_Config):
    """Where a process runs, and what is around it."""

    launcher: list[str] = []
    """Put before its command to start it on another machine, with the same directories and the same Python:
    ["srun", "--overlap", "--nodes=1", "--ntasks=1", "--nodelist=node2"]. Standard input and output go through
    it, and it ends when the launcher does. Empty: on this machine."""
    host: str = "127.0.0.1"
    """By which other machines reach it."""
    environment: dict[str, str] = {}
    """Variables of its process: CUDA_VISIBLE_DEVICES says which GPUs are its own."""


class ColdStart(_Config):
    """Supervised training on what the gold policy does, before the policy samples anything."""

    tasks: str
    """Whose demonstrations are learnt from, as for `swe-env run --tasks`."""
    noop: float = Field(default=0.0, ge=0, lt=1)
    """Share of these tasks whose demonstration is that of somebody who submits at once: what is learnt from
    is seldom all good, and this is a fault that rewards can be seen to mend."""
    epochs: int = Field(default=1, ge=1)
    learning_rate: float = Field(default=1e-5, gt=0)
    batch_tokens: int = Field(default=16_384, ge=2)
    other_weight: float = Field(default=0.0, ge=0, le=1)
    """Of the loss on tokens that the policy did not sample."""


class RolloutConfig(_Config):
    """What is played between two optimiser steps."""

    tasks: str
    """As for `swe-env run --tasks`; taken in an order that `seed` shuffles, and again from the beginning."""
    tasks_per_step: int = Field(ge=1)
    group_size: int = Field(ge=2)
    """Episodes a task and step: what advantages are relative to."""
    concurrency: int = Field(default=8, ge=1)
    """Episodes at once, at most."""
    workers: list[Place] = Field(default=[Place()], min_length=1)
    """Processes that play them: one has a core's worth of work with some hundreds at once."""
    replace_without_spread: bool = True
    """Play another group for one whose members all did equally well: every step learns from `tasks_per_step`
    groups. Else such a group is left out of its step, and a step costs the same however much is solved."""
    least_valid: int = Field(default=2, ge=2)
    """A group with fewer members that have a reward is lost, and another is played for it."""
    retries: int = Field(default=2, ge=0)
    """Further attempts at an episode that infrastructure ended."""
    budget: Budget = Budget()
    sampling: Sampling = Sampling()


class AsyncConfig(_Config):
    """Whether episodes are played while the trainer learns."""

    max_off_policy_steps: int = Field(default=0, ge=0)
    """Most versions between the weights that sampled a token and those that learn from it; 0 is synchronous:
    every step learns from what the newest version played. Allow at least the groups that are played at once,
    divided by `rollout.tasks_per_step`, times how much longer the longest take than the mean."""


class EvaluationConfig(_Config):
    """The held-out tasks, played by the weights of one version at a time. Nothing is learnt from them."""

    tasks: str
    every: int = Field(ge=1)
    """Steps between evaluations; there is one before the first step and one after the last."""
    n: int = Field(default=1, ge=1)
    """Episodes a task."""
    sampling: Sampling = Sampling()


class ServerConfig(_Config):
    """The vLLM servers that are started here."""

    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """None: float32 on CPU, the model's own on a GPU."""
    environment: dict[str, str] = {}
    """Variables of all of them."""
    replicas: list[Place] = Field(default=[Place()], min_length=1)
    """One server each: requests are spread over them, and all are sent the same weights."""
    arguments: list[str] = []
    """More of `vllm serve`, such as ["--tensor-parallel-size", "4"]."""
    publish: Literal["disk", "nccl"] = "disk"
    """How new weights reach it: as a model directory that it reads, or from the trainer's GPUs to its own.
    By NCCL, only weights that are evaluated, and the last, are written to disk beside checkpoints."""
    start_seconds: float = Field(default=600, gt=0)
    update_seconds: float = Field(default=600, gt=0)
    """Longest time that loading new weights may take."""
    mismatch: float = Field(default=1e-4, gt=0)
    """Largest difference of a logprob between trainer and server, mean over tokens, with which training goes
    on [nats]. In float32 it is rounding; in bfloat16 allow what the first comparison of a run reports."""

    @model_validator(mode="after")
    def _fits(self) -> ServerConfig:
        if self.publish == "nccl" and len(self.replicas) > 1:
            raise ValueError("publish is nccl, which reaches one server: take disk, or one of replicas")
        if self.publish == "nccl" and self.replicas[0].launcher:
            raise ValueError("publish is nccl, which reaches a server of this machine: take disk")
        return self


class LoraConfig(_Config):
    """Train small matrices beside frozen ones (LoRA, arXiv 2106.09685), with peft.

    What is published and saved is the whole model, with the matrices added in: any server loads it.
    """

    rank: int = Field(default=32, ge=1)
    alpha: int = Field(default=64, ge=1)
    """The update is alpha / rank times the product of the two matrices."""
    targets: list[str] = ["q_proj", "k_proj", "v_proj", "o_proj"]
    """Linear layers, by the end of their name. Routed experts are no linear layers, and stay as they are."""


class ModelConfig(_Config):
    """How a model is held and computed. Master weights are float32 in any case."""

    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of matrix products. Unsharded, bfloat16 is autocast, and the head stays in float32; sharded, FSDP
    gathers weights as bfloat16, the head among them, and adds gradients up in float32."""
    activation_checkpointing: bool = False
    """Keep only what goes into each layer; compute the rest again in the backward pass."""
    shard: bool = False
    """Also on one rank. More than one is always sharded."""
    lora: LoraConfig | None = None
    """None trains every parameter. The frozen ones are kept in `compute_dtype`."""


class TrainerConfig(ModelConfig):
    """The process that trains, and what it leaves on disk."""

    ranks: int = Field(default=1, ge=1)
    """Processes in all, one a GPU (torchrun)."""
    nodes: int = Field(default=1, ge=1)
    """Machines that they are on: the launcher starts one torchrun on each."""
    rendezvous: str = ""
    """Where these meet, such as "node3:29500"; for more than one node."""
    place: Place = Place()
    micro_batch_tokens: int = Field(default=32_768, ge=2)
    """Tokens in a forward pass: at least those of the longest episode."""
    checkpoint_every: int = Field(default=10, ge=1)
    """Steps; there is one after the last in any case."""
    keep: int = Field(default=2, ge=1)
    """Checkpoints, and models beside the served and the best one."""

    @model_validator(mode="after")
    def _fits(self) -> TrainerConfig:
        if self.ranks % self.nodes:
            raise ValueError(
                f"{self.ranks} ranks (ranks) are not the same number on {self.nodes} nodes (nodes)"
            )
        if self.nodes > 1 and not (self.rendezvous and self.place.launcher):
            raise ValueError("nodes is more than 1: give place.launcher, which starts them, and rendezvous")
        return self


class Penalty(_Config):
    """What an episode costs, at most, off its reward; 0 is off.

    Each cost is taken relative to the largest of the group and times the group's mean reward: where nothing
    is solved nothing is asked for, and brevity counts fully once everything is.
    """

    input_tokens: float = Field(default=0.0, ge=0, le=1)
    """For tokens that the policy read: prompts and observations."""
    action_tokens: float = Field(default=0.0, ge=0, le=1)
    """For tokens that it sampled."""
    turns: float = Field(default=0.0, ge=0, le=1)


class Ipo(_Config):
    """Keep a token if |π - μ| ≤ ε, whatever the sign of Â (prime-rl; PRs 1930, 2798, 3418, 3586)."""

    kind: Literal["ipo"] = "ipo"
    epsilon: float = Field(default=0.3, gt=0, le=1)
    kl_tau: float = Field(default=0.0, ge=0)
    """Weight of (log r)². prime-rl had ε = 0.1 and τ = 1e-3 before it settled on these."""


class IcePop(_Config):
    """Keep a token if α ≤ r ≤ β (Ring-1T, arXiv 2510.18855; bounds of INTELLECT-3, arXiv 2512.16144)."""

    kind: Literal["icepop"] = "icepop"
    alpha: float = Field(default=0.2, gt=0, le=1)
    beta: float = Field(default=5.0, ge=1)


class Dppo(_Config):
    """Drop a token that has already moved by δ to where Â pushes it (binary TV, arXiv 2602.04879)."""

    kind: Literal["dppo"] = "dppo"
    delta_low: float = Field(default=0.2, gt=0, le=1)
    """For Â < 0: drop if π - μ < -δ."""
    delta_high: float = Field(default=0.2, gt=0, le=1)
    """For Â > 0: drop if π - μ > δ."""
    kl_tau: float = Field(default=1e-3, ge=0)
    """Weight of (log r)²."""


class Unmasked(_Config):
    """Keep every token: importance weighting alone, the baseline that the masks are compared with."""

    kind: Literal["unmasked"] = "unmasked"


MaskConfig = Ipo | IcePop | Dppo
LossConfig = Annotated[Ipo | IcePop | Dppo | Unmasked, Field(discriminator="kind")]


class OptimiserConfig(_Config):
    """AdamW, its schedule, and the longest step that a gradient may ask for."""

    learning_rate: float = Field(default=1e-5, gt=0)
    """The largest one, at the end of the warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of a linear rise; the first has 1/warmup_steps of the learning rate, not 0."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    total_steps: int | None = Field(default=None, ge=1)
    """Where the decay ends, warm-up included. It must be given where there is one."""
    final_fraction: float = Field(default=0.1, ge=0, le=1)
    """Of the learning rate, from `total_steps` on."""
    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    """Of matrices; biases and norms have none."""
    clip_norm: float = Field(default=1.0, gt=0)
    """Gradients of a larger global norm are scaled down to it; infinity is off."""


def read_training(
    file: Path, options: dict[str, Any] | None = None, settings: Sequence[str] = ()
) -> TrainConfig:
    """The training that a TOML file asks for, `options` (those not None) over it, then `settings`, each of
    them `name=value` as in `loss.kind=icepop`.

    A file may name another one, beside it, that it changes: `extends = "tiny.toml"`. A table of another
    kind (`loss.kind`) replaces the other's, and `cold_start = false` leaves one out.

    Raises :class:`RunError` that names the field.
    """
    content = _read_toml(file)
    content |= {name: value for name, value in (options or {}).items() if value is not None}
    for setting in settings:
        content = _merged(content, _read_setting(setting))
    try:
        return TrainConfig.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(str(part) for part in first["loc"] if part not in LOSSES)
        said = first["msg"].removeprefix("Value error, ")
        raise RunError(f"{file}: {name + ': ' if name else ''}{said[:1].lower()}{said[1:]}") from None


def _read_toml(file: Path, *extended: Path) -> dict[str, Any]:
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
        base = content.pop("extends", None)
    except (OSError, ValueError) as error:
        raise RunError(f"cannot read {file}: {error}") from None
    if base is None:
        return content
    extended = (*extended, file.resolve())
    if not isinstance(base, str) or (file.parent / base).resolve() in extended:
        raise RunError(f"{file}: extends: give the name of another file beside it")
    return _merged(_read_toml(file.parent / base, *extended), content)


def _read_setting(setting: str) -> dict[str, Any]:
    name, equals, value = setting.partition("=")
    if not equals:
        raise RunError(f"--set {setting}: no value: give one like loss.kind=ipo")
    for text in (setting, f"{name} = {json.dumps(value)}"):  # a word needs no quotes
        with suppress(tomllib.TOMLDecodeError):
            return tomllib.loads(text)
    raise RunError(f"--set {setting}: {name} is no name: give one like loss.kind=ipo")


def _merged(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for name, new in change.items():
        old = merged.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            below, above = cast("dict[str, Any]", old), cast("dict[str, Any]", new)
            of_a_kind = above.get("kind", below.get("kind")) == below.get("kind")
            merged[name] = _merged(below, above) if of_a_kind else above
        elif new is False and isinstance(old, dict):
            del merged[name]
        else:
            merged[name] = new
    return merged


LOSSES = ("ipo", "icepop", "dppo", "unmasked")
"""`loss.kind`."""
