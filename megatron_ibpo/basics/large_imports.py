"""Imports of large libraries without work that nothing needs."""

import gc
import importlib.metadata
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Import torch, Megatron or vLLM within this block, a sixth faster: Python does not search all imported
    objects for garbage again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def declared_packages() -> Iterator[None]:
    """Import transformers within this block, .7 seconds faster: it asks which package belongs to which
    distribution, for which Python reads the file list of each one that declares no packages."""
    packages_distributions = importlib.metadata.packages_distributions
    importlib.metadata.packages_distributions = _packages_distributions
    try:
        yield
    finally:
        importlib.metadata.packages_distributions = packages_distributions


def _packages_distributions() -> Mapping[str, list[str]]:
    """Return package → distributions, as they declare it; one that declares nothing has its own name."""
    distributions = defaultdict(list)
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"]
        packages = distribution.read_text("top_level.txt") or name.replace("-", "_")
        for package in packages.split():
            distributions[package].append(name)
    return distributions
