# shellcheck shell=bash
# Sourced by run.sh next to this file: from its variables to one launch line.
#
#   IBPO_CWD                                      where the user stands
#   HF_CHECKPOINT                                 the model: a directory, or owner/name on the Hugging Face Hub
#   NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT   where several nodes meet; one node needs none of them
#   GPUS_PER_NODE                                 empty: those found here
#   RUN_DIR                                       empty: a new directory under runs/

fail() {
    echo "error: $*" >&2
    exit 2
}

# check_number NAME LEAST MOST: the variable is empty or such a number. Before bash takes its text for arithmetic.
check_number() {
    local value=${!1:-}
    if [[ -z $value ]]; then
        return
    fi
    if [[ ! $value =~ ^[0-9]{1,9}$ ]] || ((10#$value < $2 || 10#$value > $3)); then
        fail "$1=$value: must be a whole number between $2 and $3"
    fi
}

check_run_dir() {
    [[ -n $RUN_DIR ]] || ((10#${NNODES:-1} == 1)) || fail "set RUN_DIR to a directory that all $NNODES nodes share"
}

# choose FLAGS…: set RECIPE, NNODES, PROCESSES (trainers on this node) and LAYOUT_ARGS by model and devices.
choose() {
    local python chosen previous flag is_plan=false
    check_number NNODES 1 1000000
    check_number NODE_RANK 0 999999
    check_number GPUS_PER_NODE 0 1024
    check_number MASTER_PORT 0 65535
    check_number OMP_NUM_THREADS 1 1024
    for flag in "$@"; do # the flag wins over the variable
        case $flag in
            --hf-checkpoint=*) HF_CHECKPOINT=${flag#*=} ;;
            --dry-run) is_plan=true ;;
        esac
        case ${previous:-} in --hf-checkpoint) HF_CHECKPOINT=$flag ;; esac
        previous=$flag
    done
    $is_plan || check_run_dir
    python=$(bash tools/bootstrap.sh) || exit $?
    chosen=$("$python" -m megatron_ibpo.commands.choose_recipe --hf-checkpoint "$HF_CHECKPOINT" ${NNODES:+--nodes "$NNODES"} \
        ${GPUS_PER_NODE:+--gpus-per-node "$GPUS_PER_NODE"} -- "$@") || exit $?
    mapfile -t chosen <<<"$chosen"
    RECIPE=${chosen[0]} NNODES=${chosen[1]} PROCESSES=${chosen[2]}
    # shellcheck disable=SC2034 # read by the script that sources this
    LAYOUT_ARGS=("${chosen[@]:3}")
}

# verify_first PYTHON FLAGS…: without --verify among FLAGS, nothing. Otherwise check the run, with --full on its own
# model, and exit if something is wrong; then FLAGS is set to the others.
verify_first() {
    local python=$1 flag is_asked=false full=()
    FLAGS=()
    for flag in "${@:2}"; do
        case $flag in
            --verify) is_asked=true ;;
            --full) full=(--full) ;;
            *) FLAGS+=("$flag") ;;
        esac
    done
    if ! $is_asked; then
        FLAGS=("${@:2}")
        return
    fi
    "$python" -m megatron_ibpo.commands.verify --config "$RECIPE" --num-trainers $((NNODES * PROCESSES)) \
        "${full[@]}" "${FLAGS[@]}" || exit $?
}

# launch FLAGS…: train with the recipe and these flags; with --dry-run among them print the plan, for which no
# process is launched; with --verify check the run first (ibpo verify). One process drives the run, and starts the
# trainers and engines through Ray.
launch() {
    local flag python command
    python=$(bash tools/bootstrap.sh) || exit $?
    verify_first "$python" "$@"
    set -- "${FLAGS[@]}"
    for flag in "$@"; do
        if [[ $flag == --dry-run ]]; then
            exec "$python" -m megatron_ibpo.commands.train --config "$RECIPE" --dry-run-gpus-per-node "$PROCESSES" \
                --dry-run-world-size $((NNODES * PROCESSES)) "$@"
        fi
    done

    if [[ -z $RUN_DIR ]]; then
        check_run_dir
        RUN_DIR=$PWD/runs/$(basename "$RECIPE" .yaml)_$(date +%Y%m%d_%H%M%S)
    fi
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
    command=("$python" -m megatron_ibpo.commands.train --config "$RECIPE" --num-trainers $((NNODES * PROCESSES))
        --run-dir "$RUN_DIR" "$@")
    if ((NNODES > 1)); then
        exec "$python" -m megatron_ibpo.cluster.nodes --num-nodes "$NNODES" --node-rank "$NODE_RANK" \
            --address "$MASTER_ADDR:${MASTER_PORT:-6379}" --run-dir "$RUN_DIR" -- "${command[@]}"
    fi
    exec "${command[@]}"
}
