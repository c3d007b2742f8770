"""Checks of what a Megatron checkpoint holds alongside tensors, before anything unpickles it.

Scalars of the optimizer, the schedule, a tool's arguments, random states and Transformer Engine's
`_extra_state` are stored as pickles. torch's distributed reader unpickles every entry that `.metadata` calls
bytes with `weights_only=False`, so a checkpoint could run code. Here torch's restricted unpickler reads the
same bytes first. It knows tensors and plain containers, and is given the other classes that Megatron-LM
stores.
"""

from __future__ import annotations

import argparse
import io
import re
import signal
import types
from collections.abc import Callable, Iterator
from pathlib import Path, PosixPath
from typing import Any

import numpy as np
import torch
from numpy._core.multiarray import _reconstruct
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from megatron_ibpo.basics.user_files import RECORD_BYTES, check_user_file, read_user_file
from megatron_ibpo.weights.weight_errors import CheckpointError, listed

_COMMON_FILE = "common.pt"
"""File in which older versions of Megatron keep everything but tensors."""

_HARMLESS: dict[str, Callable[..., Any]] = {
    "_io.BytesIO": io.BytesIO,
    "argparse.Namespace": argparse.Namespace,
    "builtins.bytes": bytes,
    "numpy._core.multiarray._reconstruct": _reconstruct,
    "numpy.core.multiarray._reconstruct": _reconstruct,
    "numpy.dtype": np.dtype,
    "numpy.dtypes.UInt32DType": np.dtypes.UInt32DType,
    "numpy.ndarray": np.ndarray,
    "pathlib.PosixPath": PosixPath,
    "pathlib._local.PosixPath": PosixPath,
    "signal.Signals": signal.Signals,
    "torch._C.Generator": torch._C.Generator,
    "types.SimpleNamespace": types.SimpleNamespace,
}
_OF_MEGATRON = (
    "megatron.core.enums.ModelType",
    "megatron.core.optimizer.optimizer_config.OptimizerConfig",
    "megatron.core.rerun_state_machine.RerunDiagnostic",
    "megatron.core.rerun_state_machine.RerunMode",
    "megatron.core.rerun_state_machine.RerunState",
    "megatron.core.transformer.enums.AttnBackend",
    "megatron.core.transformer.enums.CudaGraphModule",
    "megatron.core.transformer.enums.CudaGraphScope",
    "megatron.core.transformer.enums.InferenceCudaGraphScope",
)
"""Together, what `megatron.core.safe_globals` allows. By name, since tools run without Megatron."""


class _StandIn:
    """A stand-in for an object of Megatron's; accepts the arguments and state that belong to it."""

    def __new__(cls, *_: Any, **__: Any) -> _StandIn:
        return super().__new__(cls)

    def __init__(self, *_: Any, **__: Any):
        pass

    def __setstate__(self, state: Any) -> None:
        pass


def check_byte_entries(directory: Path, metadata: Metadata) -> None:
    """Unpickle everything in `directory` that is not a tensor, with an unpickler that cannot run code.

    Args:
        metadata: metadata of the directory, whose files all exist.

    Raises:
        CheckpointError: an entry is damaged or needs a class that is not allowed; names file and entry.
    """
    allowed = {**_HARMLESS, **dict.fromkeys(_OF_MEGATRON, _StandIn)}
    # pairs: given bare classes, torch would forget at the end those that Megatron has allowed for itself
    with torch.serialization.safe_globals([(allowed_class, name) for name, allowed_class in allowed.items()]):
        for path, entry, data in _entries(directory, metadata):
            try:
                torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
            except Exception as error:
                raise CheckpointError(
                    f"{path}: {entry} is damaged or unsafe, and was not read: {_reason(error)}; "
                    "take another copy of the checkpoint, or save it anew without this entry"
                ) from None


def _entries(directory: Path, metadata: Metadata) -> Iterator[tuple[Path, str, bytes]]:
    """Yield file, name and bytes of each pickle."""
    for index, place in metadata.storage_data.items():
        if isinstance(metadata.state_dict_metadata.get(index.fqn), TensorStorageMetadata):
            continue  # read with weights_only=True by all readers
        path = directory / place.relative_path
        if place.transform_descriptors:
            raise CheckpointError(
                f"{path}: {index.fqn} is stored through the transforms "
                f"{listed(place.transform_descriptors)}; save the checkpoint without transforms"
            )
        check_user_file(path)
        with path.open("rb") as file:
            file.seek(place.offset)
            yield path, index.fqn, file.read(place.length)
    common = directory / _COMMON_FILE
    if common.is_file():
        yield common, "the common state", read_user_file(common, RECORD_BYTES)


def _reason(error: Exception) -> str:
    """Return the reason without torch's advice, which is to allow what was refused."""
    refused_global = re.search(r"GLOBAL (\S+)", str(error))
    return (
        f"it asks for {refused_global[1]}"
        if refused_global
        else f"not a pickle of plain data ({type(error).__name__})"
    )
