"""Engines started with this folder on PYTHONPATH run vLLM's second model runner on CPUs, as GPUs do: its
kernels are Triton's, which run on Triton's interpreter. Nothing of vLLM is changed."""

import os
from types import SimpleNamespace

os.environ |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}  # before Triton is imported

import triton
from triton.backends import backends
from triton.runtime import interpreter

# vLLM's wheel for CPUs takes Triton if it has this back end
backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)
patched, patch_language = set(), interpreter._patch_lang


def patch_once(function):
    """Replace Triton's language once for each module of kernels: at every call it takes half of the time.
    The numbers of its ranges become Triton's, as in compiled kernels; the interpreter's have no `to`."""
    if function.__module__ not in patched:
        patched.add(function.__module__)
        patch_language(function)
        numbers = triton.language.range
        triton.language.range = lambda *ends, **hints: map(interpreter._implicit_cvt, numbers(*ends, **hints))
    return interpreter._LangPatchScope()


interpreter._patch_lang = patch_once
