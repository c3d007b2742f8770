#!/usr/bin/env bash
# Runs the tests, and makes what they need first.
#
#   bash tests/run.sh [--all] [pytest's arguments]
#
# --all adds the tests marked slow. The slowest tests are listed at the end.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

selection=(-m "not slow")
arguments=()
for argument in "$@"; do
    if [[ $argument == --all ]]; then
        selection=()
    else
        arguments+=("$argument")
    fi
done
python=$(bash tools/bootstrap.sh dev)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # tests start several processes on few cores
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
exec "$python" -m pytest "${selection[@]}" "${arguments[@]}"
