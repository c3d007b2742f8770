#!/usr/bin/env bash
# Runs the tests, and makes what they need first.
#
#   bash tests/run.sh [--all] [pytest's arguments]
#
# bubblewrap and a Chromium, which some tests need, are installed where apt-get may; pytest says at its end what is
# missing all the same, which tests were the slowest and which files took more than a minute. --all adds the tests marked
# slow and, if it stands alone, runs what computes numbers once more, rounded as on another processor, leaves the results
# of both in tools/results/tests.json, and takes a user's first day (tests/first_day.sh). The rules marked lint are
# .ci/lint's.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

selection=(-m "not slow and not lint")
arguments=()
numeric=(tests/credit/test_{credit,token_credit}.py tests/loss/test_{linear_loss,loss}.py
    tests/models/test_{gated_delta_net,model_parity}.py tests/policy/test_{critic,gradient_meter,trainer}.py
    tests/run/test_golden.py)
all=false
for argument in "$@"; do
    if [[ $argument == --all ]]; then
        all=true selection=(-m "not lint")
    else
        arguments+=("$argument")
    fi
done
python=$(bash tools/bootstrap.sh dev)
NOT_TESTED=$(bash tools/system_programs.sh bubblewrap chromium)
export NOT_TESTED # for tests/conftest.py
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # tests start several processes on few cores
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
unset PYTHONDONTWRITEBYTECODE # hundreds of processes would each compile the package anew
# A file is a worker's as a whole, since its tests share what is costly to start; tests wait for processes more than
# they compute, so a worker per core keeps the cores busy.
side_by_side=(-n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder)
if ! $all || ((${#arguments[@]})); then
    exec "$python" -m pytest "${side_by_side[@]}" "${selection[@]}" "${arguments[@]}"
fi
results=tools/results/tests.json status=0
rm -f "$results"
"$python" -m pytest "${side_by_side[@]}" "${selection[@]}" --results "$results" || status=$?
# MKL takes other code on AMD than on Intel; so it takes neither's, and last bits differ from both
MKL_CBWR=COMPATIBLE "$python" -m pytest "${side_by_side[@]}" --results "$results" -m "not slow" "${numeric[@]}" || status=$?
bash tests/first_day.sh || status=$?
exit "$status"
