#!/usr/bin/env bash
# The kernels under NVIDIA's compute-sanitizer on this machine's GPU: out-of-bounds accesses, reads of memory nobody
# wrote, races in shared memory, barriers that not all threads reach. Not run by those who wrote it: no GPU was at hand.
#
#   bash tests/gpu_sanitizer.sh [pytest's arguments]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${IBPO_PYTHON:-.venv/bin/python}
"$python" -c 'import torch; assert torch.cuda.is_available(), "no GPU here"'
command -v compute-sanitizer >/dev/null || {
    echo "compute-sanitizer is not on PATH; it comes with the CUDA toolkit" >&2
    exit 1
}
# Memory that torch keeps for reuse would hide what lies beyond a tensor's end.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1 OMP_NUM_THREADS=1
for tool in memcheck initcheck racecheck synccheck; do
    echo "== $tool"
    compute-sanitizer --tool "$tool" --error-exitcode 1 --launch-timeout 600 --target-processes all \
        "$python" -m pytest tests/gpu -q -k "variant_equals or several_blocks or peak_comes_late or padded or inplace" "$@"
done
