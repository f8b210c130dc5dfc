"""Every default and bound of the engine, once.

The classes are frozen pydantic dataclasses: they validate wherever they are built (a notebook, a request, a
stored row), refuse unknown fields, NaN and infinities, and serialise to the resolved config that is stored
with each job. Request schemas of the API embed them, so a bound stated here is the bound that a client sees.

Sources: the reference settings are METHOD section 6 (DiffusionNFT on SD3.5-Medium).
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    AfterValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    TypeAdapter,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.dataclasses import dataclass

MAX_STEPS = 1000
MAX_PROMPTS = 20_000
MAX_STAGES = 8
MAX_SHARDS = 64
MAX_FAILED_SHARE = 0.2
"""A reward that fails on more than this share of the images it applies to ends the job."""

STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)

Steps = Annotated[int, Field(ge=1, le=MAX_STEPS, description="denoising steps")]
Shift = Annotated[float, Field(ge=0.01, le=100.0)]
"""Of a sampler's noise levels; beyond these bounds the schedulers' float32 does not resolve them."""
Seed = Annotated[int, Field(ge=0, le=2**31 - 1)]
Weight = Annotated[float, Field(ge=0.0, le=1e9, description="relative weight; normalised to sum 1")]
Budgets = Annotated[dict[str, Weight], Field(min_length=1, max_length=64)]
Temperature = Annotated[
    float, Field(gt=0.0, le=1e9, description="tau of the affinities; large values tend to static weighting")
]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$", description="the service fills it in")]
AllocationMethod = Literal["recast", "rowwise", "static"]
Refresh = Literal["frozen", "on_drift", "every_n"]
MAX_REFRESH_SHARE = 0.05

PROPOSAL_MODELS = {"openai": "gpt-image-1.5", "google": "gemini-3-pro-image-preview"}
"""Models of proposals unless a request names its own: GPT Image 1.5, Nano Banana Pro."""


@dataclass(frozen=True, config=STRICT)
class ProposalConfig:
    """Where the clean images of the external-proposal estimator come from (METHOD section 4 a).

    An image is known by source, model, prompt, size and number, and for the sources that draw from a seed by
    that too; one that the workspace has already is never asked for again.

    Attributes:
        model: ``openai`` and ``google``: the provider's name of the model. ``diffusers``: a base model of the
            catalogue, or the hub id of a text-to-image pipeline in the worker's local cache.
        folder: ``folder``: a name in the operator's folder of proposals (``RECAST_PROPOSALS``).
        size: pixels a side of the image asked for; None: 1024 from ``openai``, else the model's own.
        quality: ``openai`` only; None: the model's own.
        steps: ``diffusers`` only; None: the model's own.
        seed: another seed asks for other images.
        max_images: a request that needs more images than this, bought before or not, is refused before
            anything is bought.
        concurrency: requests under way at once, per worker.
        request_seconds: how long one request may take.
        attempts: how often an image is asked for, retries included.
        deadline_seconds: how long collecting may take altogether; what was bought by then is kept.
    """

    COST_ONLY: ClassVar[frozenset[str]] = frozenset(
        ("max_images", "concurrency", "request_seconds", "attempts", "deadline_seconds")
    )
    """Fields that do not change the images."""

    source: Literal["openai", "google", "folder", "diffusers"]
    model: (
        Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?$")] | None
    ) = None
    folder: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")] | None = None
    size: Annotated[int, Field(ge=16, le=4096, description="pixels a side")] | None = None
    quality: Literal["low", "medium", "high"] | None = None
    steps: Steps | None = None
    seed: Seed = 0
    max_images: Annotated[int, Field(ge=1, le=1_000_000, description="budget, in images")] = 1000
    concurrency: Annotated[int, Field(ge=1, le=64, description="requests under way at once")] = 4
    request_seconds: Annotated[float, Field(gt=0.0, le=3600.0)] = 180.0
    attempts: Annotated[int, Field(ge=1, le=20, description="tries of one image")] = 6
    deadline_seconds: Annotated[float, Field(gt=0.0, le=7 * 86400.0)] = 6 * 3600.0

    @model_validator(mode="after")
    def _fields_of_the_source(self) -> ProposalConfig:
        for name, source in (("folder", "folder"), ("quality", "openai"), ("steps", "diffusers")):
            if getattr(self, name) is not None and self.source != source:
                raise ValueError(f"{name}: not a setting of source {self.source!r}; leave it out")
        if self.source == "folder":
            if self.folder is None:
                raise ValueError("folder: name a folder below RECAST_PROPOSALS that holds the images")
            if self.model is not None or self.size is not None:
                raise ValueError("model, size: not settings of source 'folder'; leave them out")
        elif self.model is None:
            if self.source == "diffusers":
                raise ValueError("model: name a base model or the hub id of a text-to-image pipeline")
            object.__setattr__(self, "model", PROPOSAL_MODELS[self.source])
        if self.source == "openai" and self.size is None:
            object.__setattr__(self, "size", 1024)
        if self.source == "google" and self.size not in (None, 1024, 2048, 4096):
            raise ValueError("size: source 'google' draws 1024, 2048 or 4096 pixels a side")
        return self


@dataclass(frozen=True, config=STRICT)
class AdaptiveConfig:
    """A profile that is measured in rounds until it is precise enough or its budget is spent.

    Every round draws ``images_per_prompt`` new images of every prompt and gives each level as many rollouts
    as bring the most precision per model evaluation.

    Attributes:
        target_width: stop when at every level of every reward the half-width of the 95% interval is at most
            this share of the reward's D(0).
        max_model_evaluations: never compute more velocities than this.
    """

    target_width: Annotated[float, Field(gt=0.0, le=10.0)] | None = None
    max_model_evaluations: Annotated[int, Field(ge=1, le=10**12)] | None = None

    @model_validator(mode="after")
    def _some_end(self) -> AdaptiveConfig:
        if self.target_width is None and self.max_model_evaluations is None:
            raise ValueError("give target_width, max_model_evaluations, or both")
        return self


Cleanup = Literal["smooth", "isotonic"]


@dataclass(frozen=True, config=STRICT)
class EstimatorConfig:
    """How a Rényi profile is measured (METHOD section 4).

    The number of *clean* images is ``prompts * images_per_prompt``; each noise level costs as many rollouts
    again, times ``rollouts``.

    Attributes:
        kind: ``self_tilted``: the model's own images, tilted by each reward. ``external_proposal``: images of
            ``proposals`` stand in for every positive policy, ``images_per_prompt`` of each prompt.
        anchor: roll out from pure noise too, with the other levels' random numbers. The divergence there is
            known to be 0, so what is measured is noise, and the other levels' share of it is taken off; for
            alpha = 2.
        cleanup: how the raw curve is made monotone, as theory demands: ``smooth`` takes the smoothest curve
            that its errors allow, ``isotonic`` the nearest one, a staircase.
        adaptive: measure in rounds; None: in one, of ``rollouts`` at every level.
    """

    kind: Literal["self_tilted", "external_proposal"] = "self_tilted"
    alpha: Annotated[float, Field(gt=0.0, le=10.0, description="order of the Rényi divergence")] = 2.0
    levels: Annotated[int, Field(ge=3, le=64, description="noise levels measured, both ends included")] = 9
    prompts: Annotated[int, Field(ge=2, le=MAX_PROMPTS)] = 48
    images_per_prompt: Annotated[int, Field(ge=2, le=256)] = 8
    rollouts: Annotated[int, Field(ge=1, le=64, description="stochastic rollouts per noised image")] = 1
    sampling_steps: Steps = 10
    anchor: bool = False
    advantage_clip: Annotated[
        float, Field(gt=0.0, le=1e6, description="A_max of the optimality; take the training's")
    ] = 5.0
    cleanup: Cleanup = "smooth"
    proposals: ProposalConfig | None = None
    adaptive: AdaptiveConfig | None = None

    @model_validator(mode="after")
    def _consistent(self) -> EstimatorConfig:
        external = self.kind == "external_proposal"
        if external and self.proposals is None:
            raise ValueError("proposals: say where the images of kind 'external_proposal' come from")
        if not external and self.proposals is not None:
            raise ValueError("proposals: only for kind 'external_proposal'; leave it out")
        if external and self.adaptive is not None:
            raise ValueError("adaptive: only for kind 'self_tilted'; leave it out")
        return self


@dataclass(frozen=True, config=STRICT)
class LoRAConfig:
    """The low-rank adapter; the layers it attaches to come from the backbone unless named here."""

    rank: Annotated[int, Field(ge=1, le=512)] = 32
    alpha: Annotated[float, Field(gt=0.0, le=4096.0)] = 64.0
    targets: Annotated[tuple[str, ...], Field(max_length=64)] | None = None


@dataclass(frozen=True, config=STRICT)
class SamplingConfig:
    """How training images are drawn from the old policy."""

    steps: Steps = 25
    solver: Annotated[
        Literal["ab2", "dpm2", "euler"],
        Field(description="ab2: Adams-Bashforth in sigma; dpm2: DPM-Solver++(2M), the reference's; euler"),
    ] = "ab2"
    shift: Shift | None = None  # None: the model's own
    prompts_per_epoch: Annotated[int, Field(ge=1, le=4096)] = 48
    images_per_prompt: Annotated[int, Field(ge=2, le=256)] = 24
    batch_size: Annotated[int, Field(ge=1, le=1024, description="images sampled at once, per device")] = 64


@dataclass(frozen=True, config=STRICT)
class OptimizerConfig:
    """DiffusionNFT's optimiser, loss weights and policy schedules (METHOD section 6)."""

    learning_rate: Annotated[float, Field(gt=0.0, le=1.0)] = 3e-4
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    weight_decay: Annotated[float, Field(ge=0.0, le=10.0)] = 1e-4
    gradient_clip: Annotated[float, Field(gt=0.0, le=1e6)] = 1.0
    beta: Annotated[float, Field(gt=0.0, le=100.0, description="b: strength of the implicit policy step")] = (
        0.1
    )
    kl_weight: Annotated[float, Field(ge=0.0, le=1e6)] = 1e-4
    advantage_clip: Annotated[float, Field(gt=0.0, le=1e6, description="A_max")] = 5.0
    advantage_scale: Literal["global", "group"] = "global"
    batch_size: Annotated[
        int, Field(ge=1, le=4096, description="images per forward pass, over all devices")
    ] = 32
    accumulation: Annotated[int, Field(ge=1, le=4096, description="forward passes per optimiser step")] = 1
    timesteps_per_image: Annotated[
        int, Field(ge=1, le=MAX_STEPS, description="steps t drawn per image and epoch")
    ] = 2
    old_policy: Literal["fast", "slow"] = "fast"
    ema_decay: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9


def _on_own_images(estimator: EstimatorConfig) -> EstimatorConfig:
    if estimator.kind == "external_proposal":
        raise ValueError(
            "kind: a training measures on its own images; measure a profile with external proposals first "
            "and name it as profile"
        )
    return estimator


@dataclass(frozen=True, config=STRICT)
class StageAllocation:
    """The allocation a stage trains with, measured when the stage starts unless a profile is named.

    Attributes:
        refresh: when the allocation is projected anew, from a running profile of the training's own images.
            ``frozen``: never, at no cost. ``on_drift``: once a reward's running curve has left the profile's
            interval by more than noise (at most 5% of stages without drift are). ``every_n``: after every
            ``refresh_every`` epochs of the stage. Budgets, method and temperature stay; each projection is
            stored as an allocation of the training.
        refresh_share: model evaluations that the running profile may add, as a share of those that drawing
            and training the stage's images take.
    """

    method: AllocationMethod = "recast"
    temperature: Temperature = 1.0
    profile: str | None = None
    refresh: Refresh = "frozen"
    refresh_every: Annotated[int, Field(ge=1, le=100_000, description="epochs; for every_n")] = 5
    refresh_share: Annotated[
        float, Field(gt=0.0, le=MAX_REFRESH_SHARE, description="of the stage's model evaluations")
    ] = MAX_REFRESH_SHARE
    estimator: Annotated[EstimatorConfig, AfterValidator(_on_own_images)] = Field(
        default_factory=EstimatorConfig
    )

    @model_validator(mode="after")
    def _something_to_refresh(self) -> StageAllocation:
        if self.refresh == "frozen":
            return self
        if self.method == "static":
            raise ValueError("refresh: static weighting rests on no profile; leave refresh out")
        return self


def _named_or_made(allocation: Any) -> str:
    """Which of the two it is meant to be, so that a client hears what is wrong with that one alone."""
    return "id" if isinstance(allocation, str) else "StageAllocation"


@dataclass(frozen=True, config=STRICT)
class StageConfig:
    """One training stage: what matters, for how long, and timed by which allocation.

    ``allocation`` is either the id of a stored allocation, with which the stage then trains to its end (it is
    never refreshed), or a :class:`StageAllocation`.
    """

    budgets: Budgets
    epochs: Annotated[int, Field(ge=1, le=100_000)]
    allocation: Annotated[
        Annotated[str, Tag("id")] | Annotated[StageAllocation, Tag("StageAllocation")],
        Discriminator(_named_or_made),
    ] = Field(
        default_factory=StageAllocation,
        description="id of a stored allocation, which is never refreshed, or how to make one",
    )


@dataclass(frozen=True, config=STRICT)
class RetentionConfig:
    """Which checkpoints of a training are kept; the others are deleted, wherever they were stored.

    Attributes:
        last: the newest ones.
        best: those of the highest objective, of the present stage, without doubt of the collapse guard.
        every: those of every so many epochs; None: none for that.
    """

    last: Annotated[int, Field(ge=1, le=1000, description="newest checkpoints kept")] = 2
    best: Annotated[int, Field(ge=0, le=1000, description="best checkpoints kept")] = 1
    every: Annotated[int, Field(ge=1, le=100_000, description="epochs")] | None = None


@dataclass(frozen=True, config=STRICT)
class CollapseGuardConfig:
    """When a training is paused because its objective rises at the cost of what it does not measure.

    The guard doubts an epoch whose objective is above the stage's start while the images of one prompt differ
    by less than ``diversity`` of what they did in the run's first epoch, or while the mean of ``held_out``
    has fallen by more than ``held_out_drop`` of its standard deviations in that epoch. ``epochs`` doubted
    epochs in a row end the attempt; resuming goes on.

    A sharp policy is less diverse without being broken: the miniature's quickstart ends at a third of its
    diversity with better held-out scores. The default is far below that and catches one image per prompt.

    Attributes:
        diversity: share of the start; None: not watched.
        held_out: id of a reward that no stage has a budget for; None: none is watched.
    """

    diversity: Annotated[float, Field(gt=0.0, lt=1.0, description="share of its start")] | None = 0.1
    held_out: Annotated[str, Field(min_length=1, max_length=80)] | None = None
    held_out_drop: Annotated[float, Field(gt=0.0, le=100.0, description="standard deviations")] = 1.0
    epochs: Annotated[int, Field(ge=1, le=100_000, description="epochs in a row")] = 3


@dataclass(frozen=True, config=STRICT)
class TrainingConfig:
    """A whole training run; every random draw follows from ``seed``.

    Attributes:
        gradient_checkpointing: compute each layer again in the backward pass instead of keeping what it
            computed: less memory for more time, and the same numbers. A resumed training may change it.
        devices: processes that train together, one GPU each; ``optimizer.batch_size`` and all else mean the
            same for any number of them, and so do the results, up to rounding.
    """

    model: str
    prompt_set: str
    stages: Annotated[tuple[StageConfig, ...], Field(min_length=1, max_length=MAX_STAGES)]
    adapter: str | None = None
    lora: LoRAConfig = Field(default_factory=LoRAConfig)
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    seed: Seed = 0
    checkpoint_every: Annotated[int, Field(ge=1, le=100_000, description="epochs")] = 5
    samples_every: Annotated[int, Field(ge=1, le=100_000, description="epochs between sample grids")] = 5
    retention: RetentionConfig = Field(default_factory=RetentionConfig)
    collapse: CollapseGuardConfig = Field(default_factory=CollapseGuardConfig)
    gradient_checkpointing: Annotated[bool, Field(description="less memory in the update, for more time")] = (
        False
    )
    devices: Annotated[int, Field(ge=1, le=64, description="devices that train together")] = 1
    prompt_set_sha256: Sha256 | None = None

    @field_validator("devices")
    @classmethod
    def _work_for_every_device(cls, devices: int, others: ValidationInfo) -> int:
        for field_name, part in (("sampling", "prompts_per_epoch"), ("optimizer", "batch_size")):
            settings = others.data.get(field_name)  # None: refused for a reason of its own
            if settings is not None and (size := getattr(settings, part)) < devices:
                raise ValueError(
                    f"each needs work: ask for at most {size}, or raise {field_name}.{part} to {devices}"
                )
        return devices


@dataclass(frozen=True, config=STRICT)
class ProfileConfig:
    """A Rényi profile of a model, optionally with an adapter, for a list of rewards.

    ``shards`` and ``reuse`` decide who measures and whether anybody does, never what comes out.
    """

    model: str
    rewards: Annotated[tuple[str, ...], Field(min_length=1, max_length=64)]
    prompt_set: str
    adapter: str | None = None
    estimator: EstimatorConfig = Field(default_factory=EstimatorConfig)
    seed: Seed = 0
    shards: Annotated[
        int, Field(ge=1, le=MAX_SHARDS, description="parts that workers measure at once; about one a worker")
    ] = 1
    reuse: Annotated[
        bool, Field(description="answer with the same profile where it is stored or being measured")
    ] = True
    prompt_set_sha256: Sha256 | None = None


@dataclass(frozen=True, config=STRICT)
class Subject:
    """One side of an evaluation: an adapter, or the base model itself."""

    label: Annotated[str, Field(min_length=1, max_length=80)]
    adapter: str | None = None
    base_model: str | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> Subject:
        if (self.adapter is None) == (self.base_model is None):
            raise ValueError("give exactly one of adapter and base_model")
        return self


@dataclass(frozen=True, config=STRICT)
class EvaluationConfig:
    """Subjects compared on the same prompts and the same seeds.

    ``model`` is the base model of all subjects; the service fills it in from them. ``objective`` (budgets
    over rewards) asks for the weighted training objective beside the single metrics.
    """

    subjects: Annotated[tuple[Subject, ...], Field(min_length=1, max_length=32)]
    baseline: str
    rewards: Annotated[tuple[str, ...], Field(min_length=1, max_length=64)]
    prompt_set: str
    images_per_prompt: Annotated[int, Field(ge=1, le=256)] = 4
    seeds: Annotated[tuple[Seed, ...], Field(min_length=1, max_length=32)] = (0,)
    steps: Steps = 40
    max_prompts: Annotated[int, Field(ge=1, le=MAX_PROMPTS)] | None = None
    model: str | None = None
    objective: Budgets | None = None
    prompt_set_sha256: Sha256 | None = None

    @model_validator(mode="after")
    def _consistent(self) -> EvaluationConfig:
        labels = [subject.label for subject in self.subjects]
        if len(set(labels)) != len(labels):
            raise ValueError("labels of subjects must differ")
        if self.baseline not in labels:
            raise ValueError(f"baseline {self.baseline!r} is not the label of a subject")
        if len(set(self.seeds)) != len(self.seeds):
            raise ValueError("seeds must differ: the same images twice are no further evidence")
        return self


Config = TypeVar("Config", ProfileConfig, TrainingConfig, EvaluationConfig, EstimatorConfig, ProposalConfig)


def load(cls: type[Config], data: Any) -> Config:
    """Build ``cls`` from plain JSON data. Raises ``pydantic.ValidationError`` naming every bad field."""
    return TypeAdapter(cls).validate_python(data)


def dump(config: Any) -> dict[str, Any]:
    """The resolved config as plain JSON data; ``load(type(config), dump(config)) == config``."""
    data: dict[str, Any] = TypeAdapter(type(config)).dump_python(config, mode="json")
    return data
