"""What makes a decode step on CPUs shorter changes nothing that vLLM keeps or draws."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.engine
BLOCK = 16


@pytest.fixture(scope="module")
def fixes():
    """The module, applied to vLLM: what it replaces stays in `__wrapped__`."""
    from vllm.platforms import current_platform

    from megatron_ibpo.engines.vllm import fixes

    current_platform.import_kernels()
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in [
            (fixes.KVCacheManager, "allocate_slots"),
            (fixes.TopKTopPSampler, "forward_cpu"),
            (fixes.LogprobsProcessor, "_update_sample_logprobs"),
        ]:
            patch.setattr(owner, name, getattr(owner, name))  # as it was, afterwards
        fixes._allocate_at_edges_of_blocks()
        fixes._draw_seeds_in_place()
        fixes._append_sampled_logprobs()
        yield fixes


def cache_manager(is_recurrent):
    """A manager of 40 blocks for layers of attention, and for delta nets if the model has some."""
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import init_none_hash
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec

    init_none_hash(sha256)
    attention = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=4, dtype=torch.float32)
    specs = [attention]
    if is_recurrent:
        shapes, dtypes = ((2, 2), (2, 2)), (torch.float32, torch.float32)
        specs += 2 * [MambaSpec(block_size=BLOCK, shapes=shapes, dtypes=dtypes, mamba_cache_mode="align")]
    groups = [KVCacheGroupSpec([f"layer {i}"], spec) for i, spec in enumerate(specs)]
    return KVCacheManager(KVCacheConfig(40, [], groups), 256, BLOCK, BLOCK)


def request(name, prompt_ids):
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher
    from vllm.v1.request import Request

    params = SamplingParams(max_tokens=200)
    params.update_from_generation_config({}, eos_token_id=1)
    return Request(name, prompt_ids, params, None, block_hasher=get_request_block_hasher(BLOCK, sha256))


def blocks_while_writing(allocate, is_recurrent, prompt_length, num_written):
    """Return the blocks of three requests and the number of free blocks, after each token. The first two have
    one prompt, and the third has theirs, all that they wrote and one token more."""
    manager, history = cache_manager(is_recurrent), []
    allocate = partial(allocate, manager)
    prompt, answer = list(range(prompt_length)), list(range(num_written))
    for name, prompt_ids in {"first": prompt, "second": prompt, "third": [*prompt, *answer, 7]}.items():
        written = request(name, prompt_ids)
        manager.new_step_starts()
        hit, num_hit = manager.get_computed_blocks(written)[:2]
        written.num_computed_tokens = num_hit
        new = len(prompt_ids) - num_hit
        assert allocate(written, new, num_new_computed_tokens=0, new_computed_blocks=hit) is not None
        written.num_computed_tokens = len(prompt_ids)
        for token in answer:
            written.append_output_token_ids(token)
            manager.new_step_starts()
            assert allocate(written, 1, num_lookahead_tokens=0) is not None
            written.num_computed_tokens += 1
            history.append((num_hit, manager.get_block_ids(name), manager.block_pool.get_num_free_blocks()))
        manager.free(written)
    return history


@pytest.mark.parametrize("prompt_length", [1, 10, 15, 16, 17, 22])
@pytest.mark.parametrize("is_recurrent", [False, True], ids=["attention", "delta nets"])
def test_blocks_are_taken_and_freed_at_the_same_tokens(fixes, is_recurrent, prompt_length):
    shorter = fixes.KVCacheManager.allocate_slots
    written = [
        blocks_while_writing(allocate, is_recurrent, prompt_length, 70)
        for allocate in (shorter, shorter.__wrapped__)
    ]
    assert written[0] == written[1]


def test_tokens_and_logprobs_come_from_the_same_seeds(fixes):
    sampler = SimpleNamespace(use_fp64_gumbel=False, logprobs_mode="processed_logprobs")
    results = []
    for sample in (
        fixes.TopKTopPSampler.forward_cpu,
        fixes.TopKTopPSampler.forward_cpu.__wrapped__,
    ):
        torch.manual_seed(0)
        generators = {row: torch.Generator().manual_seed(row) for row in (0, 2, 3, 6)}
        logits = torch.randn(7, 50)
        steps = [sample(sampler, logits.clone(), generators, None, torch.full((7,), 0.9)) for _ in range(4)]
        results.append([torch.stack(parts) for parts in zip(*steps, strict=True)])
    (ids, logprobs), (expected_ids, expected_logprobs) = results
    assert torch.equal(ids, expected_ids)
    assert torch.equal(logprobs, expected_logprobs)
    assert len(ids.unique(dim=0)) > 1


@pytest.mark.parametrize("num_positions", [1, 3])
def test_sampled_logprobs_are_appended_alike(fixes, num_positions):
    from vllm.v1.outputs import LogprobsLists

    values = np.random.default_rng(0).standard_normal((num_positions, 1)).astype(np.float32)
    ids, ranks = np.arange(num_positions)[:, None], np.arange(num_positions) + 3
    appended = []
    append = fixes.LogprobsProcessor._update_sample_logprobs
    for method in (append, append.__wrapped__):
        processor = SimpleNamespace(
            num_logprobs=0, tokenizer=None, logprobs=fixes.FlatLogprobs(), cumulative_logprob=0.0
        )
        for _ in range(2):
            method(processor, LogprobsLists(ids, values, ranks, None))
        appended.append((vars(processor.logprobs), processor.cumulative_logprob))
    assert appended[0] == appended[1]
