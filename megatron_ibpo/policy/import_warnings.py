"""Silence Megatron's warnings at import and construction: true, many, and none that a user can act on."""

import logging
import warnings


def hush_megatron() -> None:
    """Drop warnings of megatron-core and of torch's collectives; call before importing them."""
    for module in (r"megatron\.", r"torch\.distributed\.", r"torch\.jit\."):
        warnings.filterwarnings("ignore", module=module)
    logging.getLogger("megatron.core").setLevel(logging.ERROR)
