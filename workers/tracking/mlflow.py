"""MLflow: a run per training in the experiment MLFLOW_EXPERIMENT_NAME (``recast``) of MLFLOW_TRACKING_URI."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from store.settings import Settings
from workers.tracking.base import Run

JOB = "recast.job"
PARAMS_AT_ONCE = 100  # the protocol's limit
STATUSES = {"succeeded": "FINISHED", "failed": "FAILED", "cancelled": "KILLED"}

os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")  # what fails is sent again with the next epoch
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")


class Connection:
    """The run with the job's tag; epochs that it has already are not sent again."""

    def __init__(self, settings: Settings) -> None:
        self._last = -1

    def open(self, run: Run) -> None:
        self._client = MlflowClient()
        experiment = self._experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME") or "recast")
        found = self._client.search_runs([experiment], f"tags.`{JOB}` = '{run.id}'", max_results=1)
        if found:
            self._id = found[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            self._last = self._last_step(list(found[0].data.metrics))
            return
        tags = {JOB: run.id, **{f"recast.{name}": value for name, value in run.tags.items()}}
        self._id = self._client.create_run(experiment, run_name=run.id, tags=tags).info.run_id
        params = [Param(name, str(value)) for name, value in run.parameters().items()]
        for start in range(0, len(params), PARAMS_AT_ONCE):
            self._client.log_batch(self._id, params=params[start : start + PARAMS_AT_ONCE])

    def _experiment(self, name: str) -> str:
        found = self._client.get_experiment_by_name(name)
        if found is not None:
            return str(found.experiment_id)
        try:
            return str(self._client.create_experiment(name))
        except MlflowException:  # another worker was faster
            found = self._client.get_experiment_by_name(name)
            if found is None:
                raise
            return str(found.experiment_id)

    def _last_step(self, names: list[str]) -> int:
        """Of the metric that every epoch has, or of any."""
        if not names:
            return -1
        name = "objective" if "objective" in names else names[0]
        return max((metric.step for metric in self._client.get_metric_history(self._id, name)), default=-1)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if step <= self._last:
            return
        now = int(time.time() * 1000)
        metrics = [Metric(name, value, now, step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)
        self._last = step

    def close(self, status: str) -> None:
        if status in STATUSES:
            self._client.set_terminated(self._id, STATUSES[status])
