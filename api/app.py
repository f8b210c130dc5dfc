"""The FastAPI application, put together."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version

from anyio import to_thread
from fastapi import Depends, FastAPI

import migrations
from api import errors, openapi
from api.adapters.endpoints import router as adapters
from api.allocations.endpoints import router as allocations
from api.catalogue.endpoints import router as catalogue
from api.context import Context, Publish
from api.evaluations.endpoints import router as evaluations
from api.health.endpoints import router as health
from api.health.service import Probe
from api.jobs.endpoints import router as jobs
from api.keys.endpoints import router as keys
from api.metrics import RequestMetrics
from api.middleware import BodyLimit, Observed
from api.pagination import known_parameters
from api.profiles.endpoints import router as profiles
from api.prompt_sets.endpoints import router as prompt_sets
from api.prompt_sets.service import insert_builtin
from api.trainings.endpoints import router as trainings
from recast_engine.backbones.catalogue import models
from recast_engine.rewards.catalogue import REWARDS
from store import queue
from store.artifacts import ArtifactStore
from store.database import make_engine, session_factory
from store.settings import Settings

DOMAINS = (
    catalogue,
    prompt_sets,
    profiles,
    allocations,
    trainings,
    evaluations,
    adapters,
    jobs,
    keys,
)


def create_app(settings: Settings, *, publish: Publish | None = None) -> FastAPI:
    """The service on ``settings``; its database is brought up to date when the app starts.

    Args:
        settings: where things are kept.
        publish: how workers are told about a job; by default through the broker of ``settings``.
    """
    models()  # a bad RECAST_MODELS or RECAST_REWARDS stops the start, not some later request
    REWARDS.load()
    engine = make_engine(settings.database_url)
    context = Context(
        settings=settings,
        engine=engine,
        read=session_factory(engine, read_only=True),
        write=session_factory(engine),
        artifacts=ArtifactStore(settings.artifacts_url),
        publish=publish or partial(queue.publish, settings.broker_url),
    )
    app = FastAPI(
        title="ReCAST",
        version=version("recast"),
        lifespan=_lifespan,
        openapi_url=None,  # served by api.health, with a key like everything else
        redirect_slashes=False,
    )
    app.state.context = context
    app.state.metrics = RequestMetrics()
    app.state.probe = Probe(context)
    uploads = {"/v1/prompt-sets": settings.max_upload_bytes}
    app.add_middleware(BodyLimit, limit=settings.max_body_bytes, uploads=uploads)
    app.add_middleware(Observed, metrics=app.state.metrics)
    errors.install(app)
    for router in DOMAINS:
        app.include_router(router, dependencies=[Depends(known_parameters)])
    app.include_router(health)  # monitors and scrapers may add parameters of their own
    app.openapi = partial(openapi.document, app)  # type: ignore[method-assign]
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    context: Context = app.state.context
    await to_thread.run_sync(migrations.upgrade, context.settings.database_url)
    await to_thread.run_sync(insert_builtin, context)
    yield
    context.engine.dispose()
