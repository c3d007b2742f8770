"""--overlap-param-gather: each layer's new weights arrive while the layers before it compute.

After an optimizer step with a sharded optimizer a rank has only its own share of the new weights. Megatron's
DistributedDataParallel gathers the rest when the next forward pass reaches a module: a hook on each module
waits for the module's own parameters. If a module's parameters are read without calling it (the gated delta
net's convolution, an output layer whose weight the loss takes), its hook never runs. So one pass is watched
before training; afterwards the nearest called module around such a module waits in its place.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from megatron_ibpo.weights import listed

Waits = list[tuple[Module, Module]]
"""(module that is never called, nearest called module around it)."""


def find_uncalled(model: Module, run: Callable[[], object]) -> Waits:
    """Find the modules whose parameters are read without a call.

    Args:
        model: a rank's part of the model, not wrapped yet.
        run: one forward pass through it, as in training. It runs in evaluation and in training mode, without
            gradients. Collective if the pass is.

    Raises:
        ValueError: a parameter is read before the call of the module that would wait for it; names both. Or
            CUDA graphs are in use, which run without hooks.
    """
    if getattr(model.config, "cuda_graph_impl", "none") != "none":
        raise ValueError(
            "--overlap-param-gather: CUDA graphs of the model read weights without waiting for them; "
            "drop the flag, or the graphs"
        )
    passes = []
    for training in (False, True):
        model.train(training)
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            passes.append(_watched(model, run))
    return _uncalled(model, passes)


def wait_around(chunk: Any, uncalled: Waits) -> None:
    """Make the surrounding modules wait for parameters of modules that are never called. `chunk` is the model
    in Megatron's DistributedDataParallel, built with overlap_param_gather."""
    wait = chunk._make_forward_pre_hook()
    for module, around in uncalled:
        around.register_forward_pre_hook(lambda *_, module=module: wait(module))


def finish_gathers(chunks: Sequence[Any]) -> None:
    """Wait until every rank has all weights, before anything but a forward pass reads them. Collective.

    Does nothing without --overlap-param-gather, or if the weights have arrived. `chunks` are a rank's,
    wrapped by DistributedDataParallel.
    """
    groups = [
        group
        for chunk in chunks
        if chunk.ddp_config.overlap_param_gather
        for chunk_groups in (chunk.bucket_groups, chunk.expert_parallel_bucket_groups)
        for group in reversed(chunk_groups)  # the order in which forward passes need them
    ]
    for group in groups:
        if not group.param_gather_dispatched:
            group.start_param_sync()
    for group in groups:
        group.finish_param_sync(skip_next_bucket_dispatch=True)


@dataclass(frozen=True)
class _Pass:
    """A record of one forward pass."""

    calls: dict[Module, int]
    """Position of each called module, by the first call."""
    reads: dict[Parameter, int]
    """Number of modules that had been called when a parameter was first read."""


class _Reads(TorchFunctionMode):
    """A mode that records when each parameter is first read by one of torch's functions. Functions of
    Transformer Engine's own are not seen: they read in the forward pass of their module."""

    def __init__(self, record: _Pass, parameters: set[Parameter]):
        super().__init__()
        self._record, self._parameters = record, parameters

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # reading shapes and dtypes reads no values
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves(result)):
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, Parameter) and leaf in self._parameters:
                    self._record.reads.setdefault(leaf, len(self._record.calls))
        return result


def _watched(model: Module, run: Callable[[], object]) -> _Pass:
    record = _Pass({}, {})

    def called(module: Module, *_: Any) -> None:
        record.calls.setdefault(module, len(record.calls))

    with ExitStack() as stack:
        for module in model.modules():
            stack.callback(module.register_forward_pre_hook(called).remove)
        stack.enter_context(_Reads(record, set(model.parameters())))
        run()
    return record


def _uncalled(model: Module, passes: Sequence[_Pass]) -> Waits:
    """Return the waiting places for modules that some pass did not call; the modules around them were called
    in all passes."""
    modules, waits, unguarded = dict(model.named_modules()), [], []
    for name, module in modules.items():
        parameters = dict(module.named_parameters(recurse=False))
        if not parameters:
            continue
        around = next(outer for outer in _outwards(name) if all(modules[outer] in p.calls for p in passes))
        if around != name:
            waits.append((module, modules[around]))
        unguarded += [
            f"{name}.{parameter}".lstrip(".")
            for parameter, tensor in parameters.items()
            if any(p.reads.get(tensor, len(p.calls)) <= p.calls[modules[around]] for p in passes)
        ]
    if unguarded:
        raise ValueError(
            f"--overlap-param-gather: nothing waits for the new values of {listed(unguarded)}, which "
            "other modules read before their own module runs; drop the flag"
        )
    return waits


def _outwards(name: str) -> Iterator[str]:
    """Yield a module's name, and those of the modules around it; the model's own is empty."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""
