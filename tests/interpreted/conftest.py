"""These tests need Triton's interpreter, which is chosen when Triton is imported:
`tests/kernels/test_kernels.py` runs them in a process of their own. Elsewhere they are not collected."""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
