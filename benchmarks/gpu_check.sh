#!/usr/bin/env bash
# Everything of Esper that only a GPU can show, in ten minutes on a machine with torch and nvcc.
#
#   benchmarks/gpu_check.sh [FOLDER] [--wheels FOLDER] [--archive FILE]      (-h says more)
#
# PYTHON names the interpreter that has torch (default: python, or python3 if there is none).
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PYTHON=${PYTHON:-$(command -v python || command -v python3)}
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "$PYTHON" -P -m benchmarks.gpu "$@"
