"""The launcher of multi-process tests: results come back, failures are loud, nothing is left running."""

import os
import sys
import time

import pytest
import torch
import torch.distributed as dist

from support.ranks import RankFailed, run_ranks

pytestmark = pytest.mark.world


def sum_of_ranks(world, offset):
    total = torch.tensor(world.rank + offset)
    dist.all_reduce(total)
    return int(total), os.getpid(), "megatron.core" in sys.modules


def fail_on_one(world):
    if world.rank == 1:
        raise ValueError("planted")
    dist.all_reduce(torch.zeros(1))


def hang(world):
    if world.rank == 0:
        time.sleep(60)
    return os.getpid()


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_results_come_back_in_rank_order_from_a_real_world():
    results = run_ranks(sum_of_ranks, 3, 10)
    totals, pids, preloaded = zip(*results, strict=True)
    assert totals == (33, 33, 33)
    assert len(set(pids)) == 3
    assert all(preloaded)
    assert not any(alive(pid) for pid in pids)


def test_an_error_on_one_rank_is_shown_and_ends_the_others():
    start = time.monotonic()
    with pytest.raises(RankFailed, match="planted"):
        run_ranks(fail_on_one, 2)
    assert time.monotonic() - start < 30


def test_a_hanging_rank_is_killed_and_its_stack_shown():
    start = time.monotonic()
    with pytest.raises(RankFailed, match="in hang"):
        run_ranks(hang, 2, timeout=3)
    assert time.monotonic() - start < 30
