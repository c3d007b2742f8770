#!/usr/bin/env bash
# What the RayJob of kuberay.yaml runs on the head: begins the run of RUN_DIR, or goes on with it. Flags are those of
# the training. Ray tells its jobs where it is (RAY_ADDRESS), and the run takes the GPUs that it has.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
RUN_DIR=${RUN_DIR:?set it to a directory that all pods share}
if [[ -d $RUN_DIR/journal ]]; then # it has begun
    set -- "$@" --load "$RUN_DIR"
fi
exec bash tools/ibpo.sh train --run-dir "$RUN_DIR" "$@"
