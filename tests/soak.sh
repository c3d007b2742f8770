#!/usr/bin/env bash
# A long run of small steps, and the memory of each of its processes meanwhile, which must not grow.
#
#   bash tests/soak.sh [STEPS, 2000 by default] [MODEL, next or dense]
#
# Writes tools/results/soak_MODEL.json; exit status 1 if some process grew.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=$(bash tools/bootstrap.sh dev)
PYTHONPATH=$PWD:$PWD/tests exec "$python" -m support.soak "$@"
