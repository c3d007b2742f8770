"""All checks over one start of trainer and engines."""

import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from megatron_ibpo.config import Config
from megatron_ibpo.verify.batch import Subject
from megatron_ibpo.verify.live import LIVE, check_live
from megatron_ibpo.verify.prompts import check_data
from megatron_ibpo.verify.reference import check_reference
from megatron_ibpo.verify.rewards import check_rewards
from megatron_ibpo.verify.rows import CHECKS, Row, attempted, in_order
from megatron_ibpo.verify.small_run import described, small_run
from megatron_ibpo.verify.split import check_split
from megatron_ibpo.verify.tokens import check_tokens

ALONE: dict[str, Callable[[Subject], Iterable[Row]]] = {
    "rewards": check_rewards,
    "data": check_data,
    "tokens": check_tokens,
    "split": check_split,
    "reference": check_reference,
}
"""Checks that need no engine, quick ones first."""


def run_checks(
    config: Config, *, full: bool = False, only: Collection[str] = CHECKS
) -> tuple[list[Row], dict[str, Any]]:
    """Make the checks named in `only`. Return (rows in the order of CHECKS, what verify.json says about the
    settings)."""
    rows: list[Row] = []
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ibpo-verify-") as scratch:
        small = small_run(config, Path(scratch), full=full)
        subject = Subject(config, small, full)
        for name, check in ALONE.items():
            if name in only:
                _tell(name)
                rows += attempted(name, partial(_shown, partial(check, subject)))
        if set(only) & set(LIVE) and (set(only) & _NEEDS_RUN or _has_layout(small)):
            _tell("the run: " + ", ".join(name for name in LIVE if name in only))
            live = partial(_shown, partial(check_live, subject, only))
            rows += attempted(_first(only), live)
        about = described(config, small)
    missing = set(only) - {row.check.partition(":")[0] for row in rows}
    rows += [Row(name, "not checked", reason="the run ended before it") for name in missing]
    return in_order(rows), about | {"full": full, "seconds": round(time.monotonic() - began, 1)}


_NEEDS_RUN = {"engine", "arrival", "resume", "memory"}


def _has_layout(small: Config) -> bool:
    """Return whether the run has several trainer ranks."""
    return (small.cluster.num_trainers or 1) > 1


def _first(only: Collection[str]) -> str:
    """Return the check that fails if the run cannot be opened."""
    return next(name for name in LIVE if name in only and (name in _NEEDS_RUN or name == "split"))


def _shown(check: Callable[[], Iterable[Row]]) -> Iterator[Row]:
    """Yield the rows of a check, each shown as soon as it is there."""
    for row in check():
        print(f"  {row.verdict}: {row.check}", file=sys.stderr, flush=True)
        yield row


def _tell(name: str) -> None:
    print(f"checking {name} …", file=sys.stderr, flush=True)
