"""From counted work to an estimate; device seconds only where past jobs say how fast this place is."""

from __future__ import annotations

from dataclasses import dataclass

from api.context import Caller, Context
from api.jobs.schemas import Estimate, Seconds
from store.repositories import jobs

CONSIDERED = 50


@dataclass(frozen=True)
class Work:
    """What a job will do: velocities computed (per image) and (image, reward) pairs scored."""

    model_evaluations: int
    reward_calls: int

    def __add__(self, other: Work) -> Work:
        return Work(self.model_evaluations + other.model_evaluations, self.reward_calls + other.reward_calls)

    def times(self, factor: int) -> Work:
        """This work done ``factor`` times."""
        return Work(self.model_evaluations * factor, self.reward_calls * factor)


def estimate_view(
    context: Context, caller: Caller, kind: str, model: str, work: Work, *, proposal_images: int = 0
) -> Estimate:
    """``work`` with the span of device seconds that the workspace's own past jobs of this kind suggest.

    Args:
        proposal_images: images of another generator that are still to be bought.
    """
    rates = _seconds_per_evaluation(context, caller, kind, model)
    basis = "evaluations and reward calls are counted from the request; "
    seconds = None
    if rates:
        low, high = min(rates) * work.model_evaluations, max(rates) * work.model_evaluations
        seconds = Seconds(low=round(low, 2), high=round(high, 2))
        jobs = f"{len(rates)} past {kind} job" + ("s" if len(rates) > 1 else "")
        basis += f"device seconds from the throughput of {jobs} with {model}"
    else:
        basis += f"no past {kind} job with {model} tells how fast they are here"
    return Estimate(
        model_evaluations=work.model_evaluations,
        reward_calls=work.reward_calls,
        proposal_images=proposal_images,
        device_seconds=seconds,
        basis=basis,
    )


def _seconds_per_evaluation(context: Context, caller: Caller, kind: str, model: str) -> list[float]:
    with context.read() as session:
        rows, _ = jobs.page(session, caller.workspace_id, kind=kind, status="succeeded", limit=CONSIDERED)
    costs = [row.cost for row in rows if row.config.get("model") == model]
    return [
        cost["device_seconds"] / cost["model_evaluations"]
        for cost in costs
        if cost.get("model_evaluations", 0) > 0 and cost.get("device_seconds", 0) > 0
    ]
