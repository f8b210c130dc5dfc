#!/usr/bin/env bash
# Runs a short profile and training of the miniature on a CUDA device, through the engine's own entry point.
#   benchmarks/gpu_check.sh            uses .venv if there is one, else python3; PYTHON=... chooses another
# Where there is no CUDA device it says so and succeeds.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ -z "${PYTHON:-}" ]; then
  PYTHON=python3
  if [ -x .venv/bin/python ]; then PYTHON=.venv/bin/python; fi
fi
if ! "$PYTHON" -c 'import torch' 2>/dev/null; then
  echo "skipped: $PYTHON has no torch, so there is nothing to check"
  exit 0
fi
if ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  echo "skipped: no CUDA device on this machine"
  exit 0
fi
PYTHONPATH=. exec "$PYTHON" benchmarks/gpu_check.py "$@"
