"""These tests need Triton's interpreter, which is chosen when Triton is imported:
`tests/kernels/test_kernels.py` runs them in a process of their own. Elsewhere they are not collected."""

import os

import pytest

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def language_patched_once():
    """Replace Triton's language by the interpreter's once for each module of kernels. Triton does it again at
    every call of a device function, which takes half of the time."""
    from triton.runtime import interpreter

    modules, patch_language = set(), interpreter._patch_lang

    def patch_once(function):
        if function.__module__ not in modules:
            modules.add(function.__module__)
            patch_language(function)  # not restored
        return interpreter._LangPatchScope()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", patch_once)
        yield
