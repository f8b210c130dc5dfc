#!/usr/bin/env bash
# A fresh environment per interpreter with the `rewards` extra, from wheels alone: resolves, installs, imports,
# and brings none of the packages that reward models usually drag in.
#
#   .ci/install_check.sh [python3.11 python3.12 ...]
#   TORCH_INDEX_URL=...   package index to take torch from (for example a CPU-only one), before all else
set -euo pipefail
unset PYTHONPATH  # pip would take this folder for an installed package
cd "$(dirname "${BASH_SOURCE[0]}")/.."
interpreters=("$@")
[ ${#interpreters[@]} -gt 0 ] || interpreters=(python3.11 python3.12)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
checked=0
for python in "${interpreters[@]}"; do
  if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "$python: not here, or older than 3.11; skipped"
    continue
  fi
  environment="$work/$(basename "$python")"
  "$python" -m venv "$environment"
  pip=("$environment/bin/python" -m pip --disable-pip-version-check --quiet)
  "${pip[@]}" wheel --no-deps --wheel-dir "$environment/dist" .
  if [ -n "${TORCH_INDEX_URL:-}" ]; then
    "${pip[@]}" install --only-binary :all: --index-url "$TORCH_INDEX_URL" 'torch>=2.6,<2.14'
  fi
  "${pip[@]}" install --only-binary :all: "$(ls "$environment"/dist/recast-*.whl)[rewards]"
  "${pip[@]}" check
  (cd "$work" && HF_HUB_OFFLINE=1 "$environment/bin/python" - <<'PYTHON')
import importlib, importlib.metadata, pkgutil, sys

import recast_engine.rewards
import numpy as np

for module in pkgutil.iter_modules(recast_engine.rewards.__path__):
    importlib.import_module(f"recast_engine.rewards.{module.name}")
unwanted = {"mmdet", "mmcv", "mmengine", "paddlepaddle", "paddleocr", "open-clip-torch", "hpsv2", "image-reward", "timm"}
present = {(d.metadata["Name"] or "").lower() for d in importlib.metadata.distributions()} & unwanted
assert not present, f"unwanted packages: {present}"

from recast_engine.prompts import Prompt
from recast_engine.rewards.scoring import load_scorer

scorer = load_scorer(["clipscore", "hpsv2", "pickscore", "geneval", "ocr", "aesthetic", "jpeg_size"], "miniature")
circle = {"class": "circle", "count": 1}
scores = scorer(np.full((1, 48, 48, 3), 90, np.uint8), [Prompt("a red circle", text="GO", include=(circle,))])
assert np.isfinite(scores.values).all(), scores
versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "rapidocr", "onnxruntime")}
print(f"Python {sys.version.split()[0]}: every reward module imports, 7 rewards score;", versions)
PYTHON
  rm -rf "$environment"
  checked=$((checked + 1))
done
[ "$checked" -gt 0 ] || { echo 'no interpreter was checked' >&2; exit 1; }
