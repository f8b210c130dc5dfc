"""Builds the shipped weights from nothing: `python -m recast_engine.miniature.build`.

The autoencoder, the flow transformer with its text encoders, four judges, then measurements of
what was written. Every stage keeps its state under `--state` and continues where it stopped; a finished
stage is not repeated. On two cores the whole takes about 100 minutes.
"""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import torch
from diffusers import AutoencoderKL

from recast_engine.miniature import (
    PIPELINE,
    REWARDS,
    WEIGHTS,
    architecture,
    evaluate,
    reward_weights,
    vae,
    world,
)
from recast_engine.miniature import flow as flows
from recast_engine.miniature import rewards as judges
from recast_engine.miniature.architecture import Flow
from recast_engine.miniature.checkpoint import write_json
from recast_engine.miniature.measure import measure
from recast_engine.miniature.redraw import Redrawer

VAE_STEPS = 3_000
FLOW_STEPS = 1_500
WATCH_EVERY = 500
STAGES = ("vae", "flow", "export", "rewards", "card")


@dataclass(frozen=True)
class Budget:
    """Steps of every stage."""

    vae_steps: int = VAE_STEPS
    flow: flows.FlowBudget = field(default_factory=lambda: flows.FlowBudget(FLOW_STEPS))
    rewards: judges.RewardBudget = field(default_factory=judges.RewardBudget)


def build_vae(state: Path, budget: Budget) -> AutoencoderKL:
    """The trained autoencoder, from `state` when an earlier run finished it."""
    finished = state / "vae" / "model"
    if not finished.exists():
        vae.train(state / "vae", budget.vae_steps).save_pretrained(finished)
    return AutoencoderKL.from_pretrained(finished).eval().requires_grad_(False)


class Watch:
    """Judges the averaged networks during pretraining, on the same scenes and noise every time."""

    def __init__(self, autoencoder: AutoencoderKL, folder: Path, per_kind: int = 32) -> None:
        self.autoencoder = autoencoder
        self.folder = folder
        self.scenes = evaluate.balanced_scenes(per_kind, seed=77)

    def __call__(self, flow: Flow, step: int) -> None:
        captions = [scene.caption for scene in self.scenes]
        latents = architecture.sample(flow, captions, torch.Generator().manual_seed(1))
        images = vae.decode(self.autoencoder, latents)
        scores = evaluate.judge(self.scenes, images)
        line = " ".join(f"{kind} {s.strict:.2f}/{s.soft:.2f}" for kind, s in scores.items())
        print(f"watch {step} strict/soft: {line}", flush=True)
        stride = -(-len(images) // 48)
        sheet = world.contact_sheet(images[::stride], columns=12, scale=2)
        self.folder.mkdir(parents=True, exist_ok=True)
        sheet.save(self.folder / f"samples-{step:06d}.png")


def build_flow(state: Path, budget: Budget, autoencoder: AutoencoderKL) -> Flow:
    """The averaged networks after pretraining; continues from the last checkpoint."""
    watch = Watch(autoencoder, state / "flow" / "samples")
    return flows.train(autoencoder, state / "flow", budget.flow, watch, WATCH_EVERY)


def export_pipeline(flow: Flow, autoencoder: AutoencoderKL, target: Path) -> None:
    """Write the pipeline in fp16. The networks given are halved in place."""
    pipeline = architecture.pipeline(flow, autoencoder)
    pipeline.to(torch.float16)
    autoencoder.register_to_config(_name_or_path="recast-miniature")  # else the path of `state` is shipped
    shutil.rmtree(target, ignore_errors=True)
    pipeline.save_pretrained(target)


def build_rewards(state: Path, budget: Budget, redraw: Redrawer) -> None:
    """Train the judges that `state` does not hold yet and copy all into the package."""
    for name in REWARDS:
        finished = state / "rewards" / name
        if not finished.exists():
            model, head = judges.train(name, budget.rewards, redraw)
            judges.save(name, model, head, finished)
        shutil.copytree(finished, reward_weights(name), dirs_exist_ok=True)


def write_card(state: Path) -> None:
    """Measure what is in the package and store it, with what pretraining took, in `weights/card.json`."""
    progress = state / "flow" / "progress.json"
    card = measure() | {"pretraining": json.loads(progress.read_text()) if progress.exists() else {}}
    write_json(WEIGHTS / "card.json", card)
    print(json.dumps(card, indent=2, sort_keys=True))


def main() -> None:
    """Run all stages, or the one named by `--only`; `export` ships the checkpoint as it stands."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--state", type=Path, default=Path("build/miniature"), help="folder of resumable state"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", choices=STAGES, help="one stage alone")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    stages = (options.only,) if options.only else STAGES
    budget = Budget()
    autoencoder = build_vae(options.state, budget)
    if "flow" in stages:
        build_flow(options.state, budget, autoencoder)
    if "export" in stages:
        flow = flows.load_averaged(options.state / "flow", budget.flow)
        export_pipeline(flow, build_vae(options.state, budget), PIPELINE)
    if "rewards" in stages:
        flow = flows.load_averaged(options.state / "flow", budget.flow)
        build_rewards(options.state, budget, Redrawer(flow, autoencoder))
    if "card" in stages:
        write_card(options.state)


if __name__ == "__main__":
    main()
