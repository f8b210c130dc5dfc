"""The GPU check without a GPU: it says so; and its first part on the CPU with a tiny architecture."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}


def test_it_skips_with_a_clear_word_where_there_is_no_cuda_device() -> None:
    command = [str(ROOT / "benchmarks" / "gpu_check.sh")]
    run = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert run.stdout == "skipped: no CUDA device on this machine\n"


@pytest.mark.parametrize(("size", "resolution"), [("tiny", 64), ("miniature", 48)])
def test_the_engine_has_the_reference_patterns_gradients(size: str, resolution: int) -> None:
    """Three separate forward passes a batch, written out in the benchmark, in float32."""
    script = str(ROOT / "benchmarks" / "full_size.py")
    options = ["--device", "cpu", "--size", size, "--images", "8", "--steps", "2", "--training-batch", "4"]
    run = subprocess.run(
        [sys.executable, script, *options, "--repeats", "1"],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout)
    assert report["gradient_difference"] < 1e-4
    assert report["batches_halved"] == 0
    assert (report["resolution"], report["training_batch"]) == (resolution, 4)
    for pattern in ("engine", "reference"):
        assert report[pattern]["images_per_second"] > 0
        assert report[pattern]["seconds_per_optimizer_step"] > 0
    expected = report["engine"]["images_per_second"] / report["reference"]["images_per_second"]
    assert abs(report["speed_ratio"]["images_per_second"] - expected) < 1e-9
