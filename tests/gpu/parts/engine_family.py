"""Another family: samples, a device shared with the trainer, and three steps of the product."""

import sys

from job import check
from parts import engine_loop
from parts.engine_colocated import check_shared, share_device, summary
from vllm_engine import config_of, open_engine


def run(job):
    sys.modules["fla"] = None  # as `engine_loop` does: the trainer's delta nets are computed by torch
    config = config_of(job, job.variant)
    with open_engine(job, config) as engine:
        found = share_device(job, config, engine)
    text = f"{found['samples']['engine']['mean']:.1e} from transformers'; {summary(job, found)}"
    job.note(**found, summary=f"log-probs {text}")
    check_shared(found)
    check(engine_loop.can_run(), "the loop needs Ray, which is not installed")
    loop = engine_loop.train_random(job, job.variant)
    job.note(loop=loop, summary=f"log-probs {text}; loop: {engine_loop.told(loop)}")
