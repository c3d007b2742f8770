"""Benchmarks of weights on the move.

python tools/bench_weights.py convert --save tools/results/bench_convert.json      # checkpoints, beside cp
python tools/bench_weights.py update        # live export to an engine, beside a plain broadcast
python tools/bench_weights.py predict       # traffic and seconds of an update on clusters, from the plan
"""

from __future__ import annotations

import tyro
from conversion_bench import Convert, convert
from weight_update_bench import Predict, Update
from weight_update_bench import main as update

if __name__ == "__main__":
    command: Convert | Update | Predict = tyro.cli(Convert | Update | Predict, description=__doc__)
    if isinstance(command, Convert):
        convert(command)
    else:
        update(command)
