"""The back end of the delta net's backward pass, in trainers and where nothing is said. Not run yet."""

import importlib.util
import logging
import os
from contextlib import contextmanager
from unittest import mock

from job import Skipped, check
from parts import delta_net

SETTINGS = {"in trainers": "0", "where nothing is said": None}  # FLA_TILELANG


def run(job):
    if importlib.util.find_spec("fla") is None:
        raise Skipped("flash-linear-attention is not installed")
    if not job.on_gpu:
        raise Skipped("flash-linear-attention's kernels need a GPU")
    (inputs, exact), large, found, said = delta_net.short_inputs(job), delta_net.long_inputs(job), {}, []
    for name, value in SETTINGS.items():
        found[name] = own = {}
        job.note(back_ends=found)
        with tilelang_set_to(value), served() as by:
            try:
                of_rule = delta_net.with_gradients(delta_net.fla_rule, inputs)
                ms = delta_net.milliseconds(delta_net.fla_rule, large, repeats=2)
                own |= {"errors": delta_net.errors(of_rule, exact), "ms": ms}
            except Exception as error:  # of the one, which is to say nothing of the other
                own["error"] = f"{type(error).__name__}: {error}"[:500]
        own["served_by"] = sorted(by) or ["triton"]
        took = f"{own['ms']['median']:.1f} ms" if "ms" in own else "failed"
        said.append(f"{name}: {' and '.join(own['served_by'])}, {took}")
        job.note(back_ends=found, tokens=len(large["value"]), summary="; ".join(said))
    own = found["in trainers"]
    check(own["served_by"] == ["triton"], f"not Triton in trainers: {own}")
    is_right = "error" not in own and max(own["errors"].values()) <= delta_net.FLA_BOUND
    check(is_right, f"as trainers have it: {own}")


@contextmanager
def tilelang_set_to(value):
    """flash-linear-attention 0.6 looks at the variable in every call."""
    with mock.patch.dict(os.environ):
        os.environ.pop("FLA_TILELANG", None)
        os.environ |= {} if value is None else {"FLA_TILELANG": value}
        yield


@contextmanager
def served():
    """Back ends other than its own Triton kernels that took a call, as its log says once for each."""
    found = set()

    def note(record):
        said = record.getMessage()
        if said.startswith("[FLA Backend]") and " -> " in said and "rejected" not in said:
            found.add(said.rpartition(" -> ")[2].strip())

    logger, handler = logging.getLogger("fla.backends"), logging.Handler()
    level, handler.emit = logger.level, note
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
