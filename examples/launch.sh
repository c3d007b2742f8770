# shellcheck shell=bash
# Sourced by run.sh next to this file: from its variables to one launch line.
#
#   IBPO_CWD                                      where the user stands
#   HF_CHECKPOINT                                 the model, a directory
#   NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT   as torchrun has them; one node needs none of them
#   GPUS_PER_NODE                                 empty: those found here
#   RUN_DIR                                       empty: a new directory under runs/

fail() {
    echo "error: $*" >&2
    exit 2
}

# choose FLAGS…: set RECIPE, NNODES, PROCESSES (trainers on this node) and LAYOUT_ARGS by model and devices.
choose() {
    local python chosen previous flag
    for flag in "$@"; do # the flag wins over the variable
        case $flag in --hf-checkpoint=*) HF_CHECKPOINT=${flag#*=} ;; esac
        case ${previous:-} in --hf-checkpoint) HF_CHECKPOINT=$flag ;; esac
        previous=$flag
    done
    [[ $HF_CHECKPOINT == /* ]] || HF_CHECKPOINT=$IBPO_CWD/$HF_CHECKPOINT
    python=$(bash tools/bootstrap.sh) || exit $?
    chosen=$("$python" -m megatron_ibpo.choice --hf-checkpoint "$HF_CHECKPOINT" ${NNODES:+--nodes "$NNODES"} \
        ${GPUS_PER_NODE:+--gpus-per-node "$GPUS_PER_NODE"} -- "$@") || exit $?
    mapfile -t chosen <<<"$chosen"
    RECIPE=${chosen[0]} NNODES=${chosen[1]} PROCESSES=${chosen[2]}
    # shellcheck disable=SC2034 # read by the script that sources this
    LAYOUT_ARGS=("${chosen[@]:3}")
}

# launch FLAGS…: train with the recipe and these flags; with --dry-run among them print the plan, for which no
# process is launched.
launch() {
    local flag python rendezvous=(--standalone)
    python=$(bash tools/bootstrap.sh) || exit $?
    for flag in "$@"; do
        if [[ $flag == --dry-run ]]; then
            exec "$python" -m megatron_ibpo.train --config "$RECIPE" --dry-run-gpus-per-node "$PROCESSES" \
                --dry-run-world-size $((NNODES * PROCESSES)) "$@"
        fi
    done

    if ((NNODES > 1)) || [[ -n $MASTER_PORT ]]; then
        MASTER_PORT=${MASTER_PORT:-29500}
        if ((NODE_RANK == 0)) && ! port_is_free "$python" "$MASTER_PORT"; then
            fail "port $MASTER_PORT is in use on this node: set MASTER_PORT to a free one, the same on all nodes"
        fi
        rendezvous=(--node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT")
    fi
    if [[ -z $RUN_DIR ]]; then
        ((NNODES == 1)) || fail "set RUN_DIR to a directory that all $NNODES nodes share"
        RUN_DIR=runs/$(basename "$RECIPE" .yaml)_$(date +%Y%m%d_%H%M%S)
    fi
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
    export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1} # Megatron's overlap under TP asks for it
    exec "$python" -m megatron_ibpo.launch --nnodes "$NNODES" --nproc-per-node "$PROCESSES" "${rendezvous[@]}" \
        -m megatron_ibpo.train --config "$RECIPE" --run-dir "$RUN_DIR" "$@"
}

port_is_free() {
    "$1" - "$2" <<'PYTHON'
import socket, sys
with socket.socket() as probe:
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        probe.bind(("", int(sys.argv[1])))
    except OSError:
        sys.exit(1)
PYTHON
}
