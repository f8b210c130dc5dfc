"""Trackers beside the store: what arrives there, over attempts, and that no failing one is noticed."""

from __future__ import annotations

import importlib.util
import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from store.settings import Settings
from tests.workers.conftest import Service
from workers.tracking import catalogue
from workers.tracking.attempt import Tracking
from workers.tracking.base import Run
from workers.tracking.catalogue import TrackerUnavailable, connections, wanted
from workers.tracking.mirror import Mirror

CONFIG = {
    "model": "miniature",
    "seed": 3,
    "adapter": None,
    "stages": [{"epochs": 2, "budgets": {"ocr": 1.0}}],
}
RUN = Run("train_7", {"workspace": "ws_1", "model": "miniature"}, CONFIG)


def needs(package: str) -> pytest.MarkDecorator:
    found = importlib.util.find_spec(package) is not None
    return pytest.mark.skipif(not found, reason=f"{package} is not installed")


def attempt(settings: Settings, steps: range, status: str, *, offset: float = 0.0) -> None:
    """One attempt of RUN that reports ``objective`` = step / 4 + offset."""
    tracking = Tracking(connections(settings), lambda: RUN)
    for step in steps:
        tracking.metrics(step, {"objective": step / 4 + offset, "reward/ocr/mean": 0.5})
    tracking.close(status, leaving=True)


def scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    """What TensorBoard would show."""
    accumulator = EventAccumulator(str(folder)).Reload()
    return [(event.step, event.value) for event in accumulator.Scalars(name)]


def test_parameters_have_one_name_per_value() -> None:
    assert RUN.parameters() == {
        "model": "miniature",
        "seed": 3,
        "adapter": "",
        "stages.0.epochs": 2,
        "stages.0.budgets.ocr": 1.0,
    }


def test_tensorboard_shows_a_resumed_training_as_one_run(tmp_path: Path) -> None:
    """The second attempt goes on from epoch 3, whose metrics take the place of the first attempt's."""
    settings = Settings(home=tmp_path, trackers="tensorboard")
    attempt(settings, range(1, 5), "running")
    time.sleep(1.1)  # files are ordered by their time in seconds
    attempt(settings, range(3, 6), "succeeded", offset=8.0)
    folder = tmp_path / "tensorboard" / RUN.id
    assert scalars(folder, "objective") == [(1, 0.25), (2, 0.5), (3, 8.75), (4, 9.0), (5, 9.25)]
    assert scalars(folder, "reward/ocr/mean")[-1] == (5, 0.5)
    accumulator = EventAccumulator(str(folder)).Reload()
    told = accumulator.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    for word in (b"stages.0.budgets.ocr", b"tag.workspace", b"ws_1"):
        assert word in told


@needs("mlflow")
def test_mlflow_keeps_one_run_over_attempts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a database of MLflow's own; epochs that it has are not sent twice."""
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    settings = Settings(home=tmp_path, trackers="mlflow")
    attempt(settings, range(1, 4), "queued")
    client = MlflowClient()
    experiment = client.get_experiment_by_name("recast")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "RUNNING"
    attempt(settings, range(3, 6), "succeeded", offset=8.0)
    (run,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(run.info.run_id, "objective")
    assert [(point.step, point.value) for point in history] == [
        (1, 0.25),
        (2, 0.5),
        (3, 0.75),
        (4, 9.0),
        (5, 9.25),
    ]
    assert (run.info.run_name, run.info.status) == (RUN.id, "FINISHED")
    assert run.data.params["stages.0.budgets.ocr"] == "1.0"
    assert run.data.tags["recast.workspace"] == "ws_1"
    attempt(settings, range(6, 7), "failed")
    assert client.get_run(run.info.run_id).info.status == "FAILED"


@needs("wandb")
def test_wandb_keeps_a_run_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(name, value)
    settings = Settings(home=tmp_path, trackers="wandb")
    tracking = Tracking(connections(settings), lambda: RUN)
    tracking.metrics(1, {"objective": 0.25})
    mirror = tracking._mirrors[0]
    tracking.close("succeeded", leaving=False)
    assert mirror.join(60)
    (stored,) = (tmp_path / "wandb").glob(f"wandb/offline-run-*-{RUN.id}/run-{RUN.id}.wandb")
    data = stored.read_bytes()
    for word in (b"objective", b"0.25", b"workspace:ws_1", b"miniature"):
        assert word in data


class Unsteady:
    """A tracker that refuses while ``down``, and remembers the rest."""

    def __init__(self, *, down: bool = False) -> None:
        self.down, self.said = down, list[Any]()

    def _answer(self, *words: Any) -> None:
        if self.down:
            raise ConnectionError("no route to http://me:secret@tracker/api key-123\nlong story")
        self.said.append(words)

    def open(self, run: Run) -> None:
        self._answer("open", run.id)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._answer(step, dict(values))

    def close(self, status: str) -> None:
        self._answer("close", status)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_tracker_that_comes_back_gets_everything_and_its_failure_is_told_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "key-123")
    caplog.set_level(logging.INFO, logger="workers.tracking.mirror")
    tracker = Unsteady(down=True)
    mirror = Mirror("mlflow", tracker, RUN)
    for step in (1, 2):
        mirror.metrics(step, {"objective": float(step)})
        until(lambda: not mirror._news)
    until(lambda: caplog.records)
    tracker.down = False
    mirror.metrics(3, {"objective": 3.0})
    mirror.close("succeeded")
    assert mirror.join(10)
    assert tracker.said == [
        ("open", RUN.id),
        *((step, {"objective": float(step)}) for step in (1, 2, 3)),
        ("close", "succeeded"),
    ]
    assert [record.getMessage() for record in caplog.records] == [
        "train_7: mlflow failed, the training goes on: ConnectionError: no route to http://tracker/api ***",
        "train_7: mlflow answers again",
    ]


def test_a_tracker_that_never_answers_holds_nobody_up() -> None:
    """Its thread hangs in the library; metrics are taken at once, and a worker that leaves waits in vain."""
    forever = threading.Event()

    class Hanging(Unsteady):
        def open(self, run: Run) -> None:
            forever.wait()

    started = time.monotonic()
    mirror = Mirror("mlflow", Hanging(), RUN)
    for step in range(100):
        mirror.metrics(step, {"objective": 0.0})
    mirror.close("succeeded")
    assert time.monotonic() - started < 1.0
    assert not mirror.join(0.1)
    forever.set()
    assert mirror.join(10)


def test_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.tracking.mirror.MAX_PENDING", 2)
    tracker = Unsteady(down=True)
    mirror = Mirror("mlflow", tracker, RUN)
    for step in (1, 2, 3):
        mirror.metrics(step, {})
    until(lambda: mirror._failing)
    tracker.down = False
    mirror.close("succeeded")
    assert mirror.join(10)
    assert tracker.said == [("open", RUN.id), (2, {}), (3, {}), ("close", "succeeded")]


def test_trackers_are_checked_before_the_first_job(monkeypatch: pytest.MonkeyPatch) -> None:
    def names(text: str, **environ: str) -> tuple[str, ...]:
        return wanted(Settings(trackers=text), environ)

    assert names("") == ()
    assert names(" tensorboard, tensorboard,") == ("tensorboard",)
    with pytest.raises(TrackerUnavailable, match=r"'comet' is unknown; known: tensorboard, mlflow, wandb"):
        names("tensorboard,comet")
    monkeypatch.setattr(catalogue, "find_spec", lambda name: None if name == "wandb" else name)
    with pytest.raises(TrackerUnavailable, match=r"wandb needs .* pip install 'recast\[wandb\]'"):
        names("wandb")
    monkeypatch.setattr(catalogue, "find_spec", lambda name: name)
    with pytest.raises(TrackerUnavailable, match="mlflow: set MLFLOW_TRACKING_URI"):
        names("mlflow")
    with pytest.raises(TrackerUnavailable, match="wandb: set WANDB_API_KEY, or WANDB_MODE=offline"):
        names("wandb", WANDB_MODE="online")
    assert names("wandb,mlflow", WANDB_MODE="offline", MLFLOW_TRACKING_URI="http://h") == ("wandb", "mlflow")


def test_a_worker_with_an_unknown_tracker_does_not_start(service: Service) -> None:
    process = service.worker(trackers="comet")
    assert process.wait(30) == 2
    assert "RECAST_TRACKERS: 'comet' is unknown" in (service.settings.home / "worker-0.log").read_text()


def test_metrics_of_a_killed_and_resumed_training_reach_the_tracker(service: Service) -> None:
    """Through real workers: the engine dies after epoch 2, the next attempt goes on from its checkpoint."""
    job_id = service.submit(do="train", epochs=4, die_at=2)
    service.worker(trackers="tensorboard")
    assert service.finished(job_id).status == "succeeded"
    folder = service.settings.home / "tensorboard" / job_id
    service.wait(lambda: [step for step, _ in scalars(folder, "objective")][-1:] == [4])
    assert [step for step, _ in scalars(folder, "objective")] == [1, 2, 3, 4]
