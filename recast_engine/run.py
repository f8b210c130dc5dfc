"""One entry for every kind of job: a request with local files in, findings through the observer out."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from recast_engine import config as configs
from recast_engine.backbones.base import Backbone
from recast_engine.backbones.catalogue import model_info
from recast_engine.backbones.load import load_backbone
from recast_engine.errors import ConfigError, ProposalFailure
from recast_engine.evaluation.run import evaluate
from recast_engine.observer import Observer
from recast_engine.profiling.measure import measure_profile, measure_work
from recast_engine.profiling.plan import Plan, Work
from recast_engine.prompts import Prompt, checked_prompts
from recast_engine.proposals.collection import Proposals, collect
from recast_engine.rewards.scoring import load_scorer
from recast_engine.rewards.service import ScoringService
from recast_engine.rewards.settings import device as reward_device
from recast_engine.training.adapters import loaded_adapter
from recast_engine.training.devices import joined
from recast_engine.training.loop import train


@dataclass(frozen=True)
class Request:
    """What to run, with every id that ``config`` mentions resolved to a local file or to plain data.

    Attributes:
        kind: "profile", "profile_shard", "training" or "evaluation".
        config: the resolved config of that kind (``recast_engine.config``) as JSON data.
        prompts: JSONL file of the prompt set.
        adapters: adapter id -> safetensors file.
        allocations: allocation id -> stored allocation (JSON data).
        profiles: profile id -> stored profile (JSON data).
        resume_from: folder of the checkpoint to go on from.
        proposals: folder of images of external generators that are there already
            (``recast_engine.proposals``); None: none.
        work: the part of a profile that a "profile_shard" measures (``profiling.plan.Work`` as JSON data).
    """

    kind: str
    config: Mapping[str, Any]
    prompts: Path
    adapters: Mapping[str, Path] = field(default_factory=dict)
    allocations: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    profiles: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    resume_from: Path | None = None
    work: Mapping[str, Any] | None = None
    proposals: Path | None = None

    def save(self, path: Path) -> None:
        """Write as JSON."""
        path.write_text(json.dumps(asdict(self), default=str), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Request:
        """Read what ``save`` wrote."""
        data = json.loads(path.read_text(encoding="utf-8"))
        data["prompts"] = Path(data["prompts"])
        data["adapters"] = {key: Path(value) for key, value in data["adapters"].items()}
        data["proposals"] = Path(data["proposals"]) if data.get("proposals") else None
        data["resume_from"] = Path(data["resume_from"]) if data["resume_from"] else None
        return cls(**data)

    def read_prompts(self) -> list[Prompt]:
        """The prompt set, parsed.

        Raises:
            ConfigError: it is not the set whose hash the config records.
        """
        return checked_prompts(self.prompts.read_text(encoding="utf-8"), self.config.get("prompt_set_sha256"))

    def adapter(self, adapter_id: str | None) -> Path | None:
        """The file of ``adapter_id``; None stands for the base model."""
        if adapter_id is None:
            return None
        try:
            return self.adapters[adapter_id]
        except KeyError:
            raise ConfigError(f"adapter {adapter_id!r} was not provided") from None


def run(request: Request, workdir: Path, observer: Observer) -> dict[str, Any]:
    """Run ``request`` and return its result as JSON data.

    Raises:
        EngineError: anything the requester can mend.
        Stopped: the observer asked to stop.
    """
    try:
        runner = _RUNNERS[request.kind]
    except KeyError:
        raise ConfigError(f"unknown kind of job {request.kind!r}") from None
    return runner(request, workdir, observer)


def _profile(request: Request, workdir: Path, observer: Observer) -> dict[str, Any]:
    config = configs.load(configs.ProfileConfig, request.config)
    observer.phase("loading", 1)
    backbone = load_backbone(config.model)
    prompts = request.read_prompts()
    with _scoring(config.rewards, config.model, backbone, observer) as scorer:
        proposals = _proposals(request, config, prompts, workdir, backbone, observer)
        with loaded_adapter(backbone, request.adapter(config.adapter)):
            profile = measure_profile(
                backbone,
                scorer,
                prompts,
                config.estimator,
                seed=config.seed,
                observer=observer,
                proposals=proposals,
            )
    observer.finding("profile", {"stage": None, "profile": profile.to_dict()})
    return profile.summary()


def _profile_shard(request: Request, workdir: Path, observer: Observer) -> dict[str, Any]:
    """One part of a profile's round: reports its table of scores as a file."""
    config = configs.load(configs.ProfileConfig, request.config)
    if request.work is None:
        raise ConfigError("work: a shard needs the part of the profile that it measures")
    work, prompts = Work.from_dict(request.work), request.read_prompts()
    observer.phase("loading", 1)
    backbone = load_backbone(config.model)
    plan = Plan.of(config.estimator, config.rewards, prompts, config.seed)
    with _scoring(config.rewards, config.model, backbone, observer) as scorer:
        proposals = _proposals(request, config, prompts, workdir, backbone, observer)
        with loaded_adapter(backbone, request.adapter(config.adapter)):
            table = measure_work(
                backbone, scorer, prompts, plan, work, observer=observer, proposals=proposals
            )
    path = workdir / "scores.safetensors"
    table.save(path)
    facts = {"round": work.round, "shard": work.shard}
    observer.file("scores", path.name, path, facts)
    return facts


def _proposals(
    request: Request,
    config: configs.ProfileConfig,
    prompts: Sequence[Prompt],
    workdir: Path,
    backbone: Backbone,
    observer: Observer,
) -> Proposals | None:
    """The external proposals of a profile, or of the part of one that ``request.work`` is.

    Collected once everything is loaded that can fail for nothing, and before an adapter is on the model,
    which may have to draw them itself.
    """
    if config.estimator.proposals is None:
        return None
    plan = Plan.of(config.estimator, config.rewards, prompts, config.seed)
    proposals = collect(
        config.estimator.proposals,
        plan.prompts_of(prompts, request.work),
        config.estimator.images_per_prompt,
        cache=request.proposals or workdir / "proposals",
        resolution=backbone.resolution,
        observer=observer,
        backbone=backbone,
    )
    if not proposals and request.work is None:  # other parts of a profile may have images
        raise ProposalFailure(f"moderation refused all {len(plan.places)} prompts")
    return proposals


def _training(request: Request, workdir: Path, observer: Observer) -> dict[str, Any]:
    config = configs.load(configs.TrainingConfig, request.config)
    budgeted = [reward for stage in config.stages for reward in stage.budgets]
    watched = [] if config.collapse.held_out is None else [config.collapse.held_out]
    rewards = tuple(dict.fromkeys([*budgeted, *watched]))
    observer.phase("loading", 1)
    with joined(config.devices) as devices:
        backbone = load_backbone(config.model)
        with _scoring(rewards, config.model, backbone, observer) as scorer:
            result = train(
                backbone,
                scorer,
                request.read_prompts(),
                config,
                observer=observer,
                workdir=workdir,
                allocations=request.allocations,
                profiles=request.profiles,
                initial_adapter=request.adapter(config.adapter),
                resume_from=request.resume_from,
                devices=devices,
            )
    return result.to_dict()


def _evaluation(request: Request, workdir: Path, observer: Observer) -> dict[str, Any]:
    config = configs.load(configs.EvaluationConfig, request.config)
    observer.phase("loading", 1)
    if config.model is None:
        raise ConfigError("model: name the base model of the subjects")
    backbone = load_backbone(config.model)
    adapters = {subject.label: request.adapter(subject.adapter) for subject in config.subjects}
    with _scoring(config.rewards, config.model, backbone, observer, cache=True) as scorer:
        report = evaluate(
            backbone, scorer, request.read_prompts(), config, adapters, observer=observer, workdir=workdir
        )
    observer.finding("evaluation", report)
    return {"baseline": config.baseline, "verdict": report["verdict"]}


@contextmanager
def _scoring(
    rewards: Sequence[str], model: str, backbone: Backbone, observer: Observer, *, cache: bool = False
) -> Iterator[ScoringService]:
    """The job's rewards for images of ``model``, on the operator's device or else the backbone's.

    A job that ends well although scores failed has a warning that says how many and why.
    """
    device = reward_device(str(backbone.device))
    scorer = load_scorer(rewards, model_info(model).reward_world, device=device)
    with ScoringService(scorer, device=device, cache=cache) as service:
        yield service
    for reward, tally in service.tallies.items():
        if tally.failed:
            text = f"{reward}: {tally.failed} of {tally.asked} scores failed and were left out: {tally.error}"
            observer.finding("warning", {"text": text})


_RUNNERS: dict[str, Callable[[Request, Path, Observer], dict[str, Any]]] = {
    "profile": _profile,
    "profile_shard": _profile_shard,
    "training": _training,
    "evaluation": _evaluation,
}
