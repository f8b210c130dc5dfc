"""The table of who may import whom, and the promises that follow from it."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("recast_engine", "store", "workers", "api", "recast", "migrations")
FORBIDDEN_NAMES = {"utils.py", "helpers.py", "misc.py", "common.py"}
HEAVY = ("torch", "diffusers", "transformers", "peft")


def test_import_contracts_hold() -> None:
    run = subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "0 broken" in run.stdout


@pytest.mark.parametrize(
    "module",
    [
        "api.app",
        "recast.cli",
        "recast.client",
        "recast.service",
        "workers.main",
        "recast_engine.config",
        "recast_engine.allocation",
        "recast_engine.profiling",
        "recast_engine.backbones.catalogue",
        "recast_engine.rewards.catalogue",
        "workers.fanout",
    ],
)
def test_importing_loads_no_torch(module: str) -> None:
    code = (
        f"import sys, {module}; "
        f"loaded = [name for name in {HEAVY!r} if name in sys.modules]; sys.exit(', '.join(loaded) or 0)"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr


def test_no_file_is_a_drawer_for_everything() -> None:
    sources = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    assert len(sources) > 50
    assert [str(path) for path in sources if path.name in FORBIDDEN_NAMES] == []


def test_every_source_file_says_what_it_is_for() -> None:
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            assert ast.get_docstring(tree) or not tree.body, f"{path} has no docstring"


def test_nothing_unpickles() -> None:
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            for call in ("torch.load(", "pickle.load", "trust_remote_code=True", "import pickle"):
                if path.name != "convert.py" or call != "torch.load(":  # which reads tensors alone, once
                    assert call not in text, f"{call} in {path}"


def test_the_conversion_reads_tensors_alone() -> None:
    tree = ast.parse((ROOT / "recast_engine" / "rewards" / "convert.py").read_text(encoding="utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    loads = [call for call in calls if ast.unparse(call.func) == "torch.load"]
    assert len(loads) == 1
    assert [ast.unparse(k.value) for k in loads[0].keywords if k.arg == "weights_only"] == ["True"]


def test_the_project_declares_what_it_promises() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(project["optional-dependencies"]) == {
        "embedded",
        "rewards",
        "proposals",
        "postgres",
        "s3",
        "tensorboard",
        "mlflow",
        "wandb",
        "dev",
    }
    assert project["scripts"] == {"recast": "recast.cli:main"}
    assert project["license"] == "Apache-2.0"
    pinned = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    assert all(">=" in requirement for requirement in pinned)


def test_continuous_integration_runs_the_readmes_test_command() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert script.rstrip().endswith("exec make test")
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111
    assert "make test " in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_shipped_weights_stay_small() -> None:
    weights = ROOT / "recast_engine" / "miniature" / "weights"
    size = sum(path.stat().st_size for path in weights.rglob("*") if path.is_file())
    assert 0 < size <= 20 * 10**6
