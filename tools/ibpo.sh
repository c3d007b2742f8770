#!/usr/bin/env bash
# Every command of this project, from any directory and a fresh clone; sets up what is missing first.
#
#   bash tools/ibpo.sh COMMAND …        without a command it lists them
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=$(bash "$root/tools/bootstrap.sh")
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} # this checkout, also where IBPO_PYTHON has another one installed
exec "$python" -m megatron_ibpo.commands.main "$@"
