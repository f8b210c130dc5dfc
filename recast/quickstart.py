"""The whole main job over REST on the embedded service: budgets in, a better adapter and its evidence out."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image
from rich.console import Console

from recast import heatmap, service
from recast.client import Client
from recast.errors import RecastError
from recast.home import Home
from recast.memory import PeakMemory
from recast.progress import follow
from recast.tables import curves, differences, objective_difference

LEGIBLE_PIXELS = 768


@dataclass(frozen=True)
class Plan:
    """Everything the quickstart asks for; ten minutes on two cores."""

    model: str = "miniature"
    train_prompts: str = "pset_miniature_train"
    heldout_prompts: str = "pset_miniature_heldout"
    budgets: dict[str, float] = field(
        default_factory=lambda: {
            "clipscore": 0.2,
            "hpsv2": 0.15,
            "pickscore": 0.15,
            "geneval": 0.3,
            "ocr": 0.2,
        }
    )
    heldout_reward: str = "aesthetic"
    steps: int = 10
    estimator: dict[str, int] = field(
        default_factory=lambda: {"levels": 8, "prompts": 48, "images_per_prompt": 6, "sampling_steps": 10}
    )
    epochs: int = 24
    sampling: dict[str, int] = field(
        default_factory=lambda: {"steps": 10, "prompts_per_epoch": 24, "images_per_prompt": 12}
    )
    optimizer: dict[str, Any] = field(
        default_factory=lambda: {
            "learning_rate": 1e-3,
            "beta": 0.2,
            "advantage_clip": 1.0,
            "kl_weight": 0.0,
            "weight_decay": 0.0,
            "timesteps_per_image": 3,
        }
    )
    lora: dict[str, float] = field(default_factory=lambda: {"rank": 16, "alpha": 32.0})
    evaluation_prompts: int = 96
    evaluation_images: int = 4
    evaluation_steps: int = 10
    seed: int = 0

    def profile_body(self) -> dict[str, Any]:
        """The request that measures the profile."""
        return {
            "model": self.model,
            "rewards": list(self.budgets),
            "prompt_set": self.train_prompts,
            "estimator": {"kind": "self_tilted", **self.estimator},
            "seed": self.seed,
            "reuse": False,  # every run shows, and times, the whole job
        }

    def allocation_body(self, profile_id: str) -> dict[str, Any]:
        """The request that turns budgets and profile into the matrix."""
        return {"profile": profile_id, "budgets": self.budgets, "steps": self.steps}

    def training_body(self, allocation_id: str) -> dict[str, Any]:
        """The request that trains with exactly that matrix."""
        return {
            "model": self.model,
            "prompt_set": self.train_prompts,
            "stages": [{"budgets": self.budgets, "epochs": self.epochs, "allocation": allocation_id}],
            "sampling": self.sampling,
            "optimizer": self.optimizer,
            "lora": self.lora,
            "seed": self.seed,
            "samples_every": self.epochs,
        }

    def evaluation_body(self, adapter_id: str) -> dict[str, Any]:
        """The request that compares adapter and base on prompts held out from training."""
        return {
            "subjects": [
                {"label": "base", "base_model": self.model},
                {"label": "adapter", "adapter": adapter_id},
            ],
            "baseline": "base",
            "rewards": [*self.budgets, self.heldout_reward],
            "objective": self.budgets,
            "prompt_set": self.heldout_prompts,
            "max_prompts": self.evaluation_prompts,
            "images_per_prompt": self.evaluation_images,
            "steps": self.evaluation_steps,
            "seeds": [self.seed + 1],
        }


def quickstart(folder: Path, console: Console, plan: Plan | None = None) -> dict[str, Any]:
    """Run the main job with its service in ``folder/home`` and its results in a new ``folder/run-N``.

    Returns:
        The summary that is also written to ``summary.json``.

    Raises:
        RecastError: a job failed, or the service cannot start.
    """
    home = Home((folder / "home").expanduser().resolve())
    with PeakMemory() as memory:
        console.print(f"Starting the service in {home.root} ...", soft_wrap=True, markup=False)
        record = service.start_in_background(home, 0, bound=True)
        try:
            target = new_run(folder)
            with Client(record.url, home.read_key()) as client:
                run = Run(client, plan or Plan(), target, console)
                summary = run.everything()
        finally:
            service.stop_running(home)
    summary["peak_memory_bytes"] = memory.peak_bytes
    (target / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    _conclude(summary, home, console)
    return summary


def new_run(folder: Path) -> Path:
    """The next free ``run-N`` in ``folder``, made."""
    taken = [int(path.name[4:]) for path in folder.glob("run-*") if path.name[4:].isdecimal()]
    target = folder.resolve() / f"run-{max(taken, default=0) + 1}"
    target.mkdir(parents=True)
    return target


def enlarge(path: Path) -> None:
    """Repeat the pixels of a small image so that it can be looked at."""
    with Image.open(path) as image:
        factor = max(1, LEGIBLE_PIXELS // max(image.size))
        image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST).save(path)


class Run:
    """One pass of the main job; files appear in ``target`` as they are made."""

    def __init__(self, client: Client, plan: Plan, target: Path, console: Console) -> None:
        self.client, self.plan, self.target, self.console = client, plan, target, console
        self.seconds: dict[str, float] = {}

    def everything(self) -> dict[str, Any]:
        """Profile, allocate, train, evaluate, download. Raises RecastError."""
        self._check_rewards()
        with self._phase("profile", "Measuring when each reward can be told apart"):
            profile = self.client.result(self._job(self.client.create_profile(self.plan.profile_body())))
        self.console.print(curves(profile))
        allocation = self._allocate(profile["id"])
        with self._phase("training", "Training a LoRA adapter with that matrix (DiffusionNFT)"):
            training = self._job(self.client.create_training(self.plan.training_body(allocation["id"])))
        adapter = self._download_training(training["id"])
        with self._phase("evaluation", "Comparing adapter and base model on prompts held out from training"):
            job = self._job(self.client.create_evaluation(self.plan.evaluation_body(adapter["id"])))
            evaluation = self.client.result(job)
        self.client.download(f"/v1/evaluations/{evaluation['id']}/report", self.target / "report.html")
        report = evaluation["report"]
        self.console.print(differences(report))
        return {
            "folder": str(self.target),
            "ids": {
                "profile": profile["id"],
                "allocation": allocation["id"],
                "training": training["id"],
                "adapter": adapter["id"],
                "evaluation": evaluation["id"],
            },
            "budgets": allocation["budgets"],
            "budget_error": heatmap.budget_error(allocation),
            "objective": objective_difference(report),
            "verdict": report["verdict"],
            "seconds": {name: round(value, 1) for name, value in self.seconds.items()},
            "plan": asdict(self.plan),
        }

    def _check_rewards(self) -> None:
        """Refuse at once what would otherwise fail after minutes. Raises RecastError."""
        wanted = {*self.plan.budgets, self.plan.heldout_reward}
        for reward in self.client.rewards(self.plan.model):
            if reward["id"] in wanted and not reward["available"]:
                raise RecastError(f"reward {reward['id']} is not available here: {reward['reason']}")

    def _allocate(self, profile_id: str) -> dict[str, Any]:
        from recast_engine.evaluation.heatmap import save_heatmap  # matplotlib is slow to import

        with self._phase("allocation", "Turning budgets into the allocation matrix"):
            allocation = self.client.create_allocation(self.plan.allocation_body(profile_id))
            self.client.download(f"/v1/allocations/{allocation['id']}.csv", self.target / "allocation.csv")
            save_heatmap(allocation, self.target / "allocation.png")
        heatmap.show(self.console, allocation)
        error = heatmap.budget_error(allocation)
        if error > heatmap.TOLERANCE:
            raise RecastError(f"the matrix misses a budget by {error:.1e}: please report this as a bug")
        self.console.print(f"Budgets and row sums / T agree to {error:.1e}.", style="dim")
        return allocation

    def _download_training(self, training_id: str) -> dict[str, Any]:
        adapter = next(item for item in self.client.adapters(training_id) if item["final"])
        weights = self.target / "pytorch_lora_weights.safetensors"
        self.client.download(f"/v1/adapters/{adapter['id']}/download", weights)
        grids = sorted(self.client.samples(training_id), key=lambda grid: int(grid["epoch"]))
        for name, grid in (("samples-before.png", grids[0]), ("samples-after.png", grids[-1])):
            enlarge(self.client.download(grid["url"], self.target / name))
        return adapter

    def _job(self, job: dict[str, Any]) -> dict[str, Any]:
        return follow(self.client, job["id"], self.console)

    @contextmanager
    def _phase(self, name: str, title: str) -> Iterator[None]:
        self.console.rule(f"{len(self.seconds) + 1}. {title}", align="left")
        started = time.monotonic()
        yield
        self.seconds[name] = time.monotonic() - started


def _conclude(summary: dict[str, Any], home: Home, console: Console) -> None:
    console.rule("Result", align="left")
    for line in conclusion(summary):
        console.print(line, markup=False, soft_wrap=True)
    console.print(
        f"The service is stopped; `recast up --home {home.root}` shows all of this again.",
        markup=False,
        soft_wrap=True,
    )


def conclusion(summary: dict[str, Any]) -> list[str]:
    """What the run showed, in plain words, and where everything is."""
    peak = summary["peak_memory_bytes"]
    took = ", ".join(f"{name} {value:.0f} s" for name, value in summary["seconds"].items())
    files = {
        "adapter": "pytorch_lora_weights.safetensors",
        "matrix": "allocation.csv, allocation.png",
        "samples": "samples-before.png, samples-after.png",
        "report": "report.html",
        "summary": "summary.json",
    }
    return [
        helped(summary["objective"]),
        *[f"  {name:<9} {summary['folder']}/{file}" for name, file in files.items()],
        f"Took: {took}.",
        "Peak memory, all processes: "
        + ("not measured here." if peak is None else f"{peak / 2**30:.2f} GiB."),
    ]


def helped(objective: dict[str, Any]) -> str:
    """Whether training improved the weighted objective, judged by its 95% interval."""
    if objective["low"] is None or objective["high"] is None:
        return "Too little was scored to say whether training helped."
    interval = f"{objective['mean']:+.4f}, 95% interval {objective['low']:+.4f} to {objective['high']:+.4f}"
    if objective["low"] > 0:
        word = "Training improved the weighted objective on held-out prompts"
    elif objective["high"] < 0:
        word = "Training made the weighted objective worse on held-out prompts"
    else:
        word = "No difference found: the interval of the weighted objective contains zero"
    return f"{word} ({interval})."
