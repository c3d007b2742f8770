#!/usr/bin/env bash
# All that one GPU can tell of this code, in at most 45 minutes: engines, memory that is freed and lent, kernels,
# trainers, saving, parity, speed. Writes one JSON file; docs/gpu_report.md says what its numbers mean.
#
#   bash tests/gpu.sh [--quick] [--save FILE] [--only PART …] [--minutes first] [--device cpu]
#   bash tests/gpu.sh --wheels DIR                  with a network: download the small packages that it needs (37 MiB)
#   bash tests/gpu.sh --engine-wheels DIR           the same for vLLM, Ray and the whole loop, in parts of 28 MiB
#   WHEELS=DIR bash tests/gpu.sh --minutes first    without one: unpack those that this Python lacks, for the one run
#
# --quick fits into ten minutes and tunes little. --minutes first, second or third takes the parts that tell most: vLLM as
# our engine, alone, beside a trainer, and in the whole product. --device cpu runs the same parts with tiny shapes and no
# GPU. Nothing is installed and nothing is fetched: it runs on whatever Python it finds. torch, Triton and transformers
# must be there; what else is missing skips its parts, and the JSON says so.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${IBPO_PYTHON:-$root/.venv/bin/python}
[[ -x $python ]] || python=$(command -v python3)
exec "$python" "$root/tests/gpu/conductor.py" "$@"
