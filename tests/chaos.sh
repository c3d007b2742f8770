#!/usr/bin/env bash
# Kills, stops and fills up: a small run goes on whatever happens to its processes and files, and what it comes to is
# compared with a clean replay of its journal.
#
#   bash tests/chaos.sh [KILLS, 20 by default] [SEED, 0 by default] [MINUTES, no bound by default]
#
#   bash tests/chaos.sh agents [KILLS] [SEED] [MINUTES]
#       runs whose responses are episodes: drivers, engines and environments are killed, and each episode of the journal
#       is played once more (tools/results/chaos_agents.jsonl.gz)
#
# Each fault and each run is a line of tools/results/chaos.jsonl.gz (or $CHAOS_RESULTS); a campaign goes on where the last
# one with the same seed has ended, until there are so many kills. After MINUTES nothing more is killed: the run is
# finished and checked. A run that is not as it must be ends the campaign, and is kept. CHAOS_STEPS is how many steps a
# run takes, 80 by default. CHAOS_VICTIMS="driver engine engine" says what is hit in runs of episodes, each as often as
# it is named; a run whose engines are spared has one engine.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=$(bash tools/bootstrap.sh dev)
export PYTHONPATH=$PWD:$PWD/tests
if [[ ${1:-} == agents ]]; then
    export CHAOS_AGENTS=1 CHAOS_RESULTS=${CHAOS_RESULTS:-$PWD/tools/results/chaos_agents.jsonl.gz}
    shift
fi
exec "$python" -m chaos "$@"
