"""Benchmarks of weights on the move.

python tools/bench_weights.py convert --save tools/results/bench_convert.json
"""

from __future__ import annotations

import tyro
from conversion_bench import convert

if __name__ == "__main__":
    app = tyro.extras.SubcommandApp()
    app.command(convert)
    app.cli(description=__doc__, config=(tyro.conf.OmitArgPrefixes,))
