"""Checkpoints with Transformer Engine's layers; a program that prints {case: what came back differently}."""
# ruff: noqa: E402

import json
import pickle
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from support import te_stand_in

te_stand_in.install()
from megatron_ibpo.policy import cpu, parallel

cpu.activate()
from megatron_ibpo.basics.distributed import start_world
from megatron_ibpo.models import read_hf_config
from megatron_ibpo.models.backends import Backends
from megatron_ibpo.policy.checkpoint import load_checkpoint
from megatron_ibpo.policy.model import build_model
from megatron_ibpo.policy.saving import save_checkpoint
from megatron_ibpo.policy.trainer import Trainer
from megatron_ibpo.weights.formats.load import load_hf
from megatron_ibpo.weights.weight_errors import CheckpointError
from support.layouts import layout
from support.trainers import config_for

STEPS = 2  # before a save, so that the optimizer counts more than one


def main(hf_dir: Path, converted: Path, scratch: Path) -> dict[str, Any]:
    config = config_for(layout(distributed_optimizer=True))
    world, shape = start_world(), read_hf_config(hf_dir)
    parallel.initialize(config.parallel, world, seed=0)
    te = Backends(transformer_engine=True, flash_linear_attention=False)

    def trainer():
        chunks = build_model(shape, config, libraries=te)
        load_hf(chunks, shape, hf_dir)
        return Trainer(chunks, shape.vocab_size, config, world, total_updates=10)

    trained, resumed, new = trainer(), trainer(), trainer()
    original = weights(new)
    trained.optimizer.prepare_grads()
    for _ in range(STEPS):
        step(trained)
    saved = save_checkpoint(trained, scratch, STEPS, {})
    load_checkpoint(resumed, saved)
    found: dict[str, Any] = {
        "extra states": sum("_extra_state" in name for name in trained.chunks[0].module.state_dict()),
        "saved, loaded": differing(contents(trained), contents(resumed)),
    }
    step(trained)
    step(resumed)
    found["and the step after"] = differing(contents(trained), contents(resumed))
    found |= with_scales(trained, resumed, new, scratch, converted)

    for parameter in new.chunks[0].parameters():
        parameter.data.fill_(float("nan"))
    load_checkpoint(new, converted)
    found["converted, loaded"] = differing(original, weights(new))

    chunk = new.chunks[0].module
    named = chunk.sharded_state_dict
    chunk.sharded_state_dict = lambda *given, **more: {
        name: value for name, value in named(*given, **more).items() if "q_layernorm.weight" not in name
    }
    found["without a weight"] = refused(new, converted)
    return found


def with_scales(trained, resumed, new, scratch, converted) -> dict[str, Any]:
    """Return what becomes of FP8 scales that a trainer had formed when it was saved. `new` gets none."""

    def loaded(checkpoint):
        notes = load_checkpoint(new, checkpoint)
        return [name for name, own in scaled(new) if own.scales], notes

    generator = torch.Generator().manual_seed(0)
    for one in (trained, resumed, new):  # now that they are built: the layers' constructors ask for kernels
        one.chunks[0].config.fp8 = "hybrid"
    for _, module in scaled(trained):
        module.scale(generator)
    saved = save_checkpoint(trained, scratch, STEPS + 1, {})
    notes = load_checkpoint(resumed, saved)
    pairs = list(zip(scaled(trained), scaled(resumed), strict=True))
    found: dict[str, Any] = {
        "with scales": len(pairs),
        "scales of experts": sum(own.num_gemms for (_, own), _ in pairs if own.num_gemms > 1),
        "scales that differ": [name for (name, own), (_, got) in pairs if unequal(own.scales, got.scales)],
        "notes": notes,
        "of a conversion": loaded(converted),
    }
    config = new.config
    new.config = replace(config, parallel=replace(config.parallel, tensor_model_parallel_size=2))
    found["of another layout"] = loaded(saved)
    new.config = config
    _, module = scaled(trained)[0]
    module.get_extra_state = lambda: torch.frombuffer(bytearray(pickle.dumps(print)), dtype=torch.uint8)
    found["unsafe"] = refused(new, save_checkpoint(trained, scratch, STEPS + 2, {}))
    new.chunks[0].config.fp8 = None
    return found | {"without FP8": load_checkpoint(new, saved)}


def refused(trainer, checkpoint):
    try:
        load_checkpoint(trainer, checkpoint)
    except CheckpointError as error:
        return str(error)
    return "nothing"


def scaled(trainer):
    """The modules that compute in FP8, by name."""
    modules = trainer.chunks[0].named_modules()
    return [(name, module) for name, module in modules if isinstance(module, te_stand_in.Module)]


def step(trainer):
    """A step along gradients of all ones."""
    for optimizer in trainer.optimizer.chained_optimizers:
        for group in optimizer.optimizer.param_groups:
            group["lr"] = 1e-3
            for parameter in group["params"]:
                parameter.grad = torch.ones_like(parameter)
        optimizer.step_with_ready_grads()


def weights(trainer):
    return {f"model {name}": p.detach().clone() for name, p in trainer.chunks[0].named_parameters()}


def contents(trainer):
    """Weights, the optimizer's means, and the steps that it has counted."""
    found = weights(trainer)
    for which, optimizer in enumerate(trainer.optimizer.chained_optimizers):
        adam = optimizer.optimizer
        for number, group in enumerate(adam.param_groups):
            found[f"steps {which} {number}"] = torch.tensor(group["step"])
            for index, parameter in enumerate(group["params"]):
                means = {f"{name} {which} {number} {index}": v for name, v in adam.state[parameter].items()}
                found |= {name: value.clone() for name, value in means.items()}
    return found


def unequal(expected, got):
    names = expected.keys() ^ got.keys()
    return sorted(names | {n for n in expected.keys() & got.keys() if not torch.equal(expected[n], got[n])})


def differing(expected, got):
    assert len(expected) > 10
    return unequal(expected, got)


if __name__ == "__main__":
    print(json.dumps(main(*map(Path, sys.argv[1:]))))
