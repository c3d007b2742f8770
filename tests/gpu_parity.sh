#!/usr/bin/env bash
# Parity with transformers on this machine's GPUs: Transformer Engine's layers, bfloat16, NCCL; 1, 2 and 4
# ranks as far as there are GPUs. Not run by those who wrote it: no GPU was at hand.
set -euo pipefail
cd "$(dirname "$0")/.."
"${IBPO_PYTHON:-.venv/bin/python}" -c 'import torch; assert torch.cuda.is_available(), "no GPU here"'
"${IBPO_PYTHON:-.venv/bin/python}" -c 'import transformer_engine' || echo "without Transformer Engine: local layers" >&2
IBPO_PARITY_DEVICE=cuda exec "${IBPO_PYTHON:-.venv/bin/python}" -m pytest tests/test_model_parity.py -q "$@"
