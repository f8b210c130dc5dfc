"""The OpenAPI document: request bodies that ``api.body`` reads, and problem+json for every error."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from api import body, errors

DESCRIPTION = """\
Training-as-a-service for multi-objective reinforcement learning of image-generation models: budgets kept
exactly, timing measured.

Profiles, trainings and evaluations are jobs: creating one answers 202 at once; follow it under `/v1/jobs`.
Every error is an RFC 9457 problem document. Every POST that creates takes an `Idempotency-Key`.
"""
TAGS = [
    {"name": "catalogue", "description": "Base models and rewards."},
    {"name": "prompt sets", "description": "Prompts with the metadata that rewards need."},
    {"name": "profiles", "description": "When, along the denoising trajectory, each reward can act."},
    {"name": "allocations", "description": "How much of each reward acts at each step."},
    {"name": "trainings", "description": "DiffusionNFT with a timed reward."},
    {"name": "evaluations", "description": "Paired comparisons on the same prompts and seeds."},
    {"name": "adapters", "description": "Trained LoRA adapters and their download."},
    {"name": "jobs", "description": "What profiles, trainings and evaluations share."},
    {"name": "keys", "description": "API keys of a workspace."},
    {"name": "health", "description": "Liveness, readiness, metrics."},
]
_PROBLEMS = {
    "401": "No valid key",
    "403": "The key's role does not allow this",
    "404": "There is no such thing in the key's workspace",
    "409": "The state or an Idempotency-Key forbids it",
    "413": "The body is over the limit",
    "415": "The content type is not supported",
    "416": "The range lies outside the file",
    "422": "The request is not valid; `errors` names every offending field",
    "503": "The database does not answer",
}


def document(app: FastAPI) -> dict[str, Any]:
    """The app's OpenAPI document, made once."""
    if app.openapi_schema is None:
        made = get_openapi(
            title=app.title, version=app.version, description=DESCRIPTION, routes=app.routes, tags=TAGS
        )
        schemas = made["components"]["schemas"]
        for unused in ("HTTPValidationError", "ValidationError"):
            schemas.pop(unused, None)
        problem = errors.Problem.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas.update(problem.pop("$defs"), Problem=problem)
        for name, schema in body.schemas().items():
            schemas.setdefault(name, schema)
        for path, operations in made["paths"].items():
            for method, operation in operations.items():
                _document_problems(path, method, operation)
        app.openapi_schema = made
    return app.openapi_schema


def _document_problems(path: str, method: str, operation: dict[str, Any]) -> None:
    responses = operation["responses"]
    for status in [status for status in responses if status.startswith("4")]:
        del responses[status]
    wanted = set()
    if "security" in operation:
        wanted |= {"401", "403", "422", "503"}
    if "{" in path:
        wanted |= {"404"}
    if method == "post":
        wanted |= {"409", "413"}
    if "requestBody" in operation:
        wanted |= {"415"}
    if path.endswith(("/download", "/report", "/gains", "/{sample_id}")):
        wanted |= {"409", "416"}
    for status in sorted(wanted):
        responses.setdefault(
            status,
            {
                "description": _PROBLEMS[status],
                "content": {errors.MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
            },
        )
