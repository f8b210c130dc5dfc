"""Which images of another generator a profile asks for, and which of them its workspace has already."""

from __future__ import annotations

from sqlalchemy.orm import Session

from recast_engine import config as configs
from recast_engine.config import ProfileConfig
from recast_engine.profiling.plan import Plan
from recast_engine.prompts import parse_prompts
from recast_engine.proposals.keys import image_key, prompt_key
from store.models import Artifact, Job
from store.repositories import prompt_sets, proposals


def known_images(session: Session, job: Job) -> list[tuple[str, Artifact]]:
    """Those of a profile, or of the part of one that a shard measures, with their names in the cache folder.

    Raises:
        ConfigError: the profile's prompts cannot be drawn.
        NotFound: its prompt set is gone.
    """
    config = configs.load(ProfileConfig, job.config)
    asked = config.estimator.proposals
    if asked is None:
        return []
    prompts = parse_prompts(prompt_sets.get(session, config.prompt_set, job.workspace_id).content)
    plan = Plan.of(config.estimator, config.rewards, prompts, config.seed)
    keys = [prompt_key(asked, prompt.prompt) for prompt in plan.prompts_of(prompts, job.request.get("work"))]
    known = proposals.known(session, job.workspace_id, keys, config.estimator.images_per_prompt)
    return [(f"{image_key(image.prompt_key, image.number)}.png", artifact) for image, artifact in known]
