#!/usr/bin/env bash
# All that one GPU can tell of this code, in at most 20 minutes: kernels, parity, trainers, saving, weight updates,
# sleeping and waking. Writes one JSON file; docs/gpu_report.md says what its numbers mean.
#
#   bash tests/gpu.sh [--quick] [--save FILE] [--only PART …] [--device cpu]
#
# --quick fits into ten minutes. --device cpu runs the same parts with tiny shapes and no GPU. Nothing is installed and
# nothing is fetched: it runs on whatever Python it finds. torch, triton, megatron-core, numpy, safetensors and PyYAML
# must be there; what else is missing is left out, and the JSON says so.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${IBPO_PYTHON:-$root/.venv/bin/python}
[[ -x $python ]] || python=$(command -v python3)
exec "$python" "$root/tests/gpu/conductor.py" "$@"
