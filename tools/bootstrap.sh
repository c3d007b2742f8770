#!/usr/bin/env bash
# Makes what the other scripts run on, if it is not there, and prints the Python to use (all else goes to stderr).
#
#   python=$(bash tools/bootstrap.sh)         what runs need
#   python=$(bash tools/bootstrap.sh dev)     and requirements/dev.txt: lint, types, tests
#   python=$(bash tools/bootstrap.sh dev lint)     and requirements/lint.txt: all of .ci/lint
#
# .venv at the root gets the pinned packages (requirements/), megatron-core, and this package with its C++ extension.
# Each step leaves a stamp of its inputs in .venv/.steps and is skipped while they stay as they are: a second run
# takes a moment, a run after a failure goes on where that one stopped, a change of csrc/ is rebuilt.
#
#   IBPO_PYTHON       use this Python instead and install nothing in it; its versions are checked, and the extension
#                     is built for it in this directory
#   IBPO_DEVICE       cpu or cuda; empty: what .venv was made for, else cuda where nvidia-smi finds a GPU, else cpu
#   IBPO_TORCH_INDEX  package index or folder of wheels that offers torch, beside those that pip is configured with; for
#                     CUDA also Transformer Engine. Without it the build for CPUs is looked for at PyTorch's index, too
#   IBPO_WITHOUT_TRANSFORMER_ENGINE  1: set up for CUDA without it; runs then need --allow-local-modules, and are slow
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
steps=.venv/.steps
pytorch_index=https://download.pytorch.org/whl/cpu
say_every=60 # seconds of a step after which it is said that it goes on

main() {
    if [[ -n ${IBPO_PYTHON:-} ]]; then
        use_python "$IBPO_PYTHON" "$@"
        return
    fi
    local device group groups
    device=$(choose_device)
    take_turns
    mkdir -p "$steps"
    [[ $device == cpu ]] || check_driver
    step venv "virtual environment" "" make_venv
    echo "$device" >"$steps/device"
    step compiler "C++ compiler" "${CXX:-}" check_compiler
    step torch "torch" "$(grep '^torch==' "requirements/$device.txt")" install_torch "requirements/$device.txt"
    step packages "packages for $device (takes minutes)" "$(<"requirements/$device.txt")" \
        install_packages "requirements/$device.txt"
    step megatron-core "megatron-core" "$(<requirements/megatron-core.txt)" \
        pip_install --no-deps --ignore-requires-python -r requirements/megatron-core.txt
    if [[ $device == cuda && -z ${IBPO_WITHOUT_TRANSFORMER_ENGINE:-} ]]; then
        step transformer-engine "Transformer Engine (compiles for a while where there is no wheel)" \
            "$(<requirements/transformer-engine.txt)" install_transformer_engine
    fi
    # one core unpacks these while another compiles the extension
    for group in "$@"; do
        step "$group" "$group packages" "$(<"requirements/$group.txt")" \
            pip_install --no-deps -r "requirements/$group.txt"
    done &
    groups=$!
    trap 'wait "$groups"' EXIT # the lock is held until they end, if the extension fails, too
    compgen -G "megatron_ibpo/_edit_distance.*.so" >/dev/null || rm -f "$steps/project"
    step project "megatron_ibpo and its C++ extension" "$PWD $(cat setup.py pyproject.toml csrc/*.* csrc/isa/*)" \
        pip_install --no-deps --no-build-isolation -e .
    trap - EXIT
    wait "$groups" || exit 1
    echo "$PWD/.venv/bin/python"
}

say() { echo "bootstrap: $*" >&2; }

fail() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

# take_turns: one bootstrap of this directory at a time, until this one exits.
take_turns() {
    exec 9>>.bootstrap.lock
    if ! flock --nonblock 9; then
        say "waiting for another bootstrap of this directory"
        flock --timeout 3600 9 || fail "another bootstrap has held .bootstrap.lock for an hour; does it hang?"
    fi
}

# step NAME WHAT INPUTS COMMAND…: run the command, unless it has succeeded with these inputs before.
step() {
    local name=$1 what=$2 inputs started=$SECONDS log=$steps/$1.log
    inputs=$(sha256sum <<<"$3")
    shift 3
    if [[ -f $steps/$name && $(<"$steps/$name") == "$inputs" ]]; then
        return
    fi
    rm -f "$steps/$name"
    say "$what …"
    keep_saying "$what" "$log" &
    local teller=$! failed=""
    ("$@") >"$log" 2>&1 </dev/null || failed=1
    kill "$teller" 2>/dev/null || true
    wait "$teller" 2>/dev/null || true
    if [[ -n $failed ]]; then
        {
            echo "error: could not set up: $what"
            tail -n 12 "$log" | sed 's/^/  | /'
            echo "  all of it: $PWD/$log"
            echo "  what to try: $(advice "$name" "$log")"
        } >&2
        exit 1
    fi
    echo "$inputs" >"$steps/$name"
    say "$what: $((SECONDS - started)) s"
}

# keep_saying WHAT LOG: a line every so often, with the last one of the log, until this is ended. It starts no process that
# could outlive it and hold the lock.
keep_saying() {
    exec 9>&-
    local never started=$SECONDS last
    exec {never}<> <(:)
    while kill -0 $$ 2>/dev/null; do
        read -rt "$say_every" -u "$never" || true
        last=$(tail -n 1 "$2" 2>/dev/null) || true
        say "$1: $((SECONDS - started)) s so far${last:+; ${last:0:150}}"
    done
}

# advice STEP LOG: what to try after a step has failed; the next run goes on from there.
advice() {
    if grep -qi "no space left" "$2"; then
        echo "free some room (.venv takes 4 GB for CPUs, 15 GB for CUDA; pip unpacks under \$TMPDIR), then run again"
        return
    fi
    case $1 in
        venv) echo "install Python 3.11 with its venv module (Debian: python3.11-venv), or set IBPO_PYTHON" ;;
        compiler) echo "install a C++17 compiler and Python's headers (Debian: g++ python3-dev); CXX names another compiler" ;;
        torch)
            if grep -q "No matching distribution" "$2"; then
                echo "set IBPO_TORCH_INDEX to a package index or a folder of wheels that offers this build of torch for" \
                    "this Python, as PyTorch's own index does ($pytorch_index), or set IBPO_PYTHON" \
                    "to a Python that has torch. No other build is tried: it would bring gigabytes that do not fit"
            else
                echo "see that pip reaches its package index (\`pip config list\`), then run again"
            fi
            ;;
        transformer-engine)
            echo "offer its wheels in a folder or index of your own (IBPO_TORCH_INDEX), or let it compile: that needs" \
                "the pinned package of nvcc ($(found_nvcc)), headers of cuDNN 9.12 or newer ($(found_cudnn)), a C++17" \
                "compiler, and some GB of memory for each of MAX_JOBS=${MAX_JOBS:-4} processes. CUDA_HOME and CUDA_PATH" \
                "are not looked at. IBPO_WITHOUT_TRANSFORMER_ENGINE=1 sets up without it; runs then need" \
                "--allow-local-modules and take tens of times as long"
            ;;
        extension) echo "install pybind11, setuptools and a C++17 compiler for this Python; the first error is in that log" ;;
        project) echo "the compiler's first error is in that log; if it is about this repository, please report it" ;;
        *) echo "see that pip reaches its package index (\`pip config list\`), then run again" ;;
    esac
}

choose_device() {
    local made_for=""
    if [[ -f $steps/device ]]; then
        made_for=$(<"$steps/device")
    fi
    case ${IBPO_DEVICE:-$made_for} in
        "") if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then echo cuda; else echo cpu; fi ;;
        cpu | cuda)
            if [[ -n $made_for && -n ${IBPO_DEVICE:-} && $IBPO_DEVICE != "$made_for" ]]; then
                fail "IBPO_DEVICE=$IBPO_DEVICE, but .venv was made for $made_for: remove .venv and run again"
            fi
            echo "${IBPO_DEVICE:-$made_for}"
            ;;
        *) fail "IBPO_DEVICE=$IBPO_DEVICE: must be cpu or cuda" ;;
    esac
}

is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

make_venv() {
    if .venv/bin/python -m pip --version && is_new_enough .venv/bin/python; then
        return
    fi
    local candidate
    for candidate in python3.11 python3.12 python3; do # 3.11 first: the one the pins were tested with
        if command -v "$candidate" && is_new_enough "$candidate"; then
            "$candidate" -m venv .venv
            return
        fi
    done
    echo "none of python3.11, python3.12 and python3 is Python 3.11 or newer"
    return 1
}

check_compiler() {
    local headers
    headers=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("include"))') &&
        "${CXX:-g++}" -std=c++17 -fsyntax-only -I "$headers" -x c++ - <<<'#include <Python.h>'
}

# pip_install: Python compiles what it imports, unless it is told not to; pip would compile everything, which takes longer
# than all else it does.
pip_install() {
    local compile=--no-compile
    [[ -z ${PYTHONDONTWRITEBYTECODE:-} ]] || compile=--compile
    .venv/bin/python -m pip install --no-input --disable-pip-version-check "$compile" --progress-bar off "$@"
}

# install_packages REQUIREMENTS: two pips at once, each with every second line, since one unpacks on one core. Nothing is
# resolved, so neither waits for what the other installs.
install_packages() {
    local half=$steps/packages first status=0
    sed -n '1~2p' "$1" >"$half.1.txt"
    sed -n '2~2p' "$1" >"$half.2.txt"
    pip_install --no-deps -r "$half.1.txt" >"$half.1.log" 2>&1 &
    first=$!
    pip_install --no-deps -r "$half.2.txt" || status=$?
    wait "$first" || { status=$? && cat "$half.1.log"; }
    return "$status"
}

# offered: sets `offered` to pip's arguments for IBPO_TORCH_INDEX.
offered() {
    offered=()
    if [[ -d ${IBPO_TORCH_INDEX:-} ]]; then
        offered=(--find-links "$IBPO_TORCH_INDEX")
    elif [[ -n ${IBPO_TORCH_INDEX:-} ]]; then
        offered=(--extra-index-url "$IBPO_TORCH_INDEX")
    fi
}

# install_torch REQUIREMENTS: the index that most machines have offers no build for CPUs, PyTorch's own does.
install_torch() {
    local pinned
    pinned=$(grep '^torch==' "$1")
    offered
    if pip_install --no-deps "${offered[@]}" "$pinned"; then
        return
    fi
    [[ $pinned == *+cpu && -z ${IBPO_TORCH_INDEX:-} ]] || return 1
    echo "pip's sources do not offer it: PyTorch's own index is tried"
    pip_install --retries 1 --no-deps --index-url "$pytorch_index" "$pinned"
}

# check_driver: torch's CUDA 13 build needs the driver's release 580, or the compatibility package, with which nvidia-smi
# names CUDA 13 as well. Where there is no GPU, as on a login node, there is nothing to check.
check_driver() {
    local driver supported
    driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null) || return 0
    driver=${driver%%$'\n'*} # of the first GPU
    [[ $driver =~ ^[0-9]+ ]] || return 0
    ((BASH_REMATCH[0] < 580)) || return 0
    supported=$(nvidia-smi 2>/dev/null | grep -o 'CUDA Version: *[0-9]*' | grep -o '[0-9]*$') || supported=0
    ((supported < 13)) || return 0
    fail "NVIDIA's driver here is $driver, and torch for CUDA 13 needs 580 or newer. Update the driver, or install its" \
        "compatibility package (cuda-compat-13-0) and put that on LD_LIBRARY_PATH. Another torch does not help: the vLLM" \
        "of this version is built for CUDA 13, too"
}

# install_transformer_engine: wheels first, and what NVIDIA's installer does where there are none.
install_transformer_engine() {
    offered
    if pip_install --no-deps --only-binary :all: "${offered[@]}" -r requirements/transformer-engine.txt; then
        return
    fi
    echo "no package index has all wheels: its own installer looks for one at NVIDIA's, and compiles otherwise"
    local headers
    headers=$(.venv/bin/python -c "import glob, sysconfig
print(':'.join(glob.glob(sysconfig.get_path('purelib') + '/nvidia/*/include')))")
    # Transformer Engine takes CUDA_HOME before the pinned nvcc, and headers of CUDA 12 do not fit torch; torch looks for
    # the pinned ninja on PATH, and compiles on one core without it. -v: the log says what is being compiled
    (
        unset CUDA_HOME CUDA_PATH
        export PATH="$PWD/.venv/bin:$PATH" CPATH=$headers${CPATH:+:$CPATH} MAX_JOBS=${MAX_JOBS:-4}
        pip_install -v --no-deps --no-build-isolation "${offered[@]}" -r requirements/transformer-engine.txt
    )
}

found_nvcc() {
    local nvcc
    for nvcc in .venv/lib/python*/site-packages/nvidia/cu13/bin/nvcc; do
        if [[ -x $nvcc ]]; then
            echo "here: $nvcc"
            return
        fi
    done
    echo "not found; nvidia-cuda-nvcc in requirements/cuda.txt brings it"
}

found_cudnn() {
    local header
    for header in .venv/lib/python*/site-packages/nvidia/cudnn/include/cudnn.h "${CUDNN_PATH:-/usr}/include/cudnn.h"; do
        if [[ -f $header ]]; then
            echo "here: $header"
            return
        fi
    done
    echo "not found; CUDNN_PATH names them"
}

# use_python PYTHON GROUP…: print its path, if it has what a run and the groups need, and build the extension for it.
use_python() {
    local python
    python=$(command -v -- "$1") || fail "IBPO_PYTHON=$1: there is no such program"
    is_new_enough "$python" || fail "IBPO_PYTHON=$1: is not Python 3.11 or newer"
    shift
    local groups=("${@/#/requirements/}")
    groups=("${groups[@]/%/.txt}")
    "$python" -P megatron_ibpo/basics/versions.py "${groups[@]}" >&2 || exit 1
    [[ $python == /* ]] || python=$PWD/$python
    build_in_place "$python"
    echo "$python"
}

# build_in_place PYTHON: the extension beside the package, unless it is there and newer than its sources. Only this
# directory is written to: the environment may serve other checkouts, which keep their own.
build_in_place() {
    local built
    take_turns
    built=megatron_ibpo/_edit_distance$("$1" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
    if [[ -f $built && -z $(find setup.py csrc -type f -newer "$built") ]]; then
        return
    fi
    steps=build/.steps
    mkdir -p "$steps"
    rm -f "$steps/extension" # what decides is the file
    step extension "C++ extension for $1" "" "$1" setup.py --quiet build_ext --inplace --force
}

main "$@"
