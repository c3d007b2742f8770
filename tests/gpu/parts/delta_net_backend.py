"""The back end of the delta net's backward pass, in trainers and where nothing is said. Not run yet."""

import importlib.util
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from job import Job, Skipped, check
from parts import delta_net

from support.delta_net_kernels import rule_token_by_token

SETTINGS = {"in trainers": "0", "where nothing is said": None}  # FLA_TILELANG


def run(job: Job) -> None:
    if importlib.util.find_spec("fla") is None:
        raise Skipped("flash-linear-attention is not installed")
    if not job.on_gpu:
        raise Skipped("flash-linear-attention's kernels need a GPU")
    inputs, large = delta_net.short_inputs(job), delta_net.long_inputs(job)
    exact = delta_net.with_gradients(rule_token_by_token, delta_net.doubled(inputs))
    found: dict[str, Any] = {}
    for name, value in SETTINGS.items():
        found[name] = {}
        job.note(back_ends=found)
        with tilelang_set_to(value), served() as by:
            try:
                given = delta_net.cast(inputs, torch.bfloat16)
                own = delta_net.errors(delta_net.with_gradients(delta_net.fla_rule, given), exact)
                ms = delta_net.milliseconds(delta_net.fla_rule, large, repeats=2)
                found[name] = {"errors": own, "ms": ms}
            except Exception as error:  # of the one, which is to say nothing of the other
                found[name] = {"error": f"{type(error).__name__}: {error}"[:500]}
        found[name]["served_by"] = sorted(by) or ["triton"]
        job.note(back_ends=found, tokens=len(large["value"]))
    ends = {name: f"{own['ms']['median']:.1f} ms" if "ms" in own else "failed" for name, own in found.items()}
    said = [f"{name}: {' and '.join(found[name]['served_by'])}, {end}" for name, end in ends.items()]
    job.note(summary="; ".join(said))
    own = found["in trainers"]
    check(own["served_by"] == ["triton"], f"not Triton in trainers: {own}")
    is_right = "error" not in own and max(own["errors"].values()) <= delta_net.FLA_BOUND
    check(is_right, f"as trainers have it: {own}")


@contextmanager
def tilelang_set_to(value: str | None) -> Iterator[None]:
    """flash-linear-attention 0.6 looks at the variable in every call."""
    with mock.patch.dict(os.environ, {} if value is None else {"FLA_TILELANG": value}):
        if value is None:
            os.environ.pop("FLA_TILELANG", None)
        yield


@contextmanager
def served() -> Iterator[set[str]]:
    """Back ends other than its own Triton kernels that took a call, as its log says once for each."""
    found: set[str] = set()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said = record.getMessage()
            if said.startswith("[FLA Backend]") and " -> " in said and "rejected" not in said:
                found.add(said.rpartition(" -> ")[2].strip())

    logger, handler = logging.getLogger("fla.backends"), Handler()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
