"""These tests need Triton's interpreter, which is chosen when Triton is imported:
`tests/kernels/test_kernels.py` runs them in a process of their own. Elsewhere they are not collected."""

import multiprocessing
import os
from multiprocessing import forkserver

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = [] if INTERPRETED else ["test_*.py"]
NEEDED_BY_RANKS = ["support.uncollected", "interpreted.conftest", "support.kernel_cases"]
# traced terms ask for torch's compiler, which takes two seconds
NEEDED_BY_RANKS += ["megatron_ibpo.kernels.segment_loss", "torch._inductor"]

if INTERPRETED:
    # Triton replaces its language by the interpreter's at every call of a device function, which takes half
    # of the time. Once for each module of kernels is enough.
    from triton.runtime import interpreter

    patched, patch_language = set(), interpreter._patch_lang

    def patch_once(function):
        if function.__module__ not in patched:
            patched.add(function.__module__)
            patch_language(function)  # not restored
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_once


@pytest.fixture(scope="session", autouse=True)
def server_of_ranks():
    """The one that `run_ranks` would start imports Megatron too, which takes most of its time."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(NEEDED_BY_RANKS)
    forkserver.ensure_running()
