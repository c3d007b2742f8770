#!/usr/bin/env bash
# A run on SLURM that goes on after its time limit, a preemption, a crash and a lost node. From the root of the
# checkout, which all nodes see under the same path, as they do RUN_DIR and HF_CHECKPOINT:
#
#   RUN_DIR=/shared/runs/a HF_CHECKPOINT=/shared/models/Qwen3-32B sbatch --nodes=4 examples/cluster/slurm.sh
#
# Flags after the script's name go to the training, and what else examples/run.sh reads may be set. 120 seconds
# before the time limit SLURM sends SIGTERM to this script (B:), which hands it to the driver alone; ask for as long
# as a step and a checkpoint take.
#SBATCH --job-name=ibpo
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -euo pipefail
cd "$SLURM_SUBMIT_DIR"

# ---------------------------------------------------------------------------------- what you may set
export RUN_DIR=${RUN_DIR:?set it to a directory that all nodes share}
export HF_CHECKPOINT=${HF_CHECKPOINT:?set it to the directory of a model}
export GPUS_PER_NODE=${GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-}}
MOST_RESTARTS=${MOST_RESTARTS:-50} # a cause that comes back at once must not hold the nodes for ever
# -----------------------------------------------------------------------------------------------------

BAD_INPUT=2 # the exit status of a run that starting it again would not help
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
read -r MASTER_ADDR _ < <(getent ahostsv4 "${nodes[0]}")
export MASTER_ADDR NNODES=$SLURM_JOB_NUM_NODES

flags=("$@")
if [[ -d $RUN_DIR/journal ]]; then # it has begun
    flags+=(--load "$RUN_DIR")
fi
NODE_RANK=0 srun --nodes=1 --ntasks=1 --relative=0 --cpu-bind=none bash examples/run.sh "${flags[@]}" &
driver=$!
trap 'kill -TERM "$driver" 2>/dev/null' TERM
if ((NNODES > 1)); then # they lend their GPUs and end with the driver
    # shellcheck disable=SC2016 # each task expands it
    srun --nodes=$((NNODES - 1)) --ntasks=$((NNODES - 1)) --relative=1 --cpu-bind=none \
        bash -c 'NODE_RANK=$((SLURM_PROCID + 1)) exec bash examples/run.sh "$@"' node "${flags[@]}" &
fi

while kill -0 "$driver" 2>/dev/null; do
    wait "$driver" || true # a signal ends it early
done
wait "$driver" && status=0 || status=$?
if ((status == 0 || status == BAD_INPUT || ${SLURM_RESTART_COUNT:-0} >= MOST_RESTARTS)); then
    exit "$status"
fi
if [[ $(scontrol show job "$SLURM_JOB_ID") == *JobState=RUNNING* ]]; then # not after scancel
    echo "the run ended with status $status and goes on when SLURM has nodes again"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
