"""Tries every input of a seed and shows the table.

PYTHONPATH=tests python -m support.bad_inputs [SEED [COUNT]]
"""

import os
import sys

os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
os.environ |= {"TOKENIZERS_PARALLELISM": "false", "MPLBACKEND": "agg"}

from support.bad_inputs.survey import main

sys.exit(main(sys.argv[1:], seed=37, count=500))
