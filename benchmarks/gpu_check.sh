#!/usr/bin/env bash
# What a CUDA device does with this package: SD3.5-Medium's architecture against the reference's compute
# pattern, and a short profile and training of the miniature. Takes at most 6 minutes.
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
status=0
PYTHONPATH=. timeout 360 "$PYTHON" benchmarks/gpu_check.py "$@" || status=$?
if [ "$status" -eq 124 ]; then echo "failed: not done after 6 minutes" >&2; fi
exit "$status"
