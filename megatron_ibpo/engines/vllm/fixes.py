"""Fixes of vLLM's workers. On CPUs they concern updates of experts and tied heads, prompts of one token,
seeded requests whose prompt is read in parts, and the prefix cache of models with delta nets; on GPUs, sleep;
on both, updates of gpt-oss. On CPUs norms and the bookkeeping of steps are made faster. Each change applies
only to the version of vLLM that it was written for."""

import logging
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from functools import wraps
from typing import Any

import numpy as np
import torch
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.logprobs import FlatLogprobs
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.gpt_oss import GptOssForCausalLM
from vllm.platforms.cpu import CpuPlatform
from vllm.sampling_params import SamplingParams
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder
from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, MambaManager
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler, apply_top_k_top_p
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.gpu_worker import Worker
from vllm.version import __version__ as VERSION

from megatron_ibpo.engines.vllm.messages import MARK

log = logging.getLogger(__name__)
GREW = "Memory usage increased after sleeping."
"""Message of vLLM's worker."""
Weights = Iterable[tuple[str, torch.Tensor]]
EXPERTS = tuple(f".experts.{name}_proj{kind}" for name in ("gate_up", "down") for kind in ("", "_bias"))
"""Suffixes of tensors that hold all experts of a layer."""
SINKS = ".self_attn.sinks"
Normalized = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""Normalized rows; beside a residual also the sum that was normalized."""


def written_for(version: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Return a decorator of a function that changes vLLM. With another version than begins with `version` it
    raises RuntimeError and changes nothing."""

    def guard(change: Callable[[], None]) -> Callable[[], None]:
        @wraps(change)
        def guarded() -> None:
            if not f"{VERSION}.".startswith(f"{version}."):
                raise RuntimeError(
                    f"vLLM {VERSION}: {change.__module__}.{change.__name__} was written for vLLM {version}, "
                    f"and without it {VERSION} may sample wrongly; install {version}, or read what it fixes"
                )
            change()

        return guarded

    return guard


def replaces(owner: Any, name: str) -> Callable[[Callable[..., Any]], None]:
    """Return a decorator that puts a function in the place of the owner's one of this name. It gets that one
    as its first argument."""

    def substitute(function: Callable[..., Any]) -> None:
        original = getattr(owner, name)

        @wraps(original)
        def replacement(*arguments: Any, **options: Any) -> Any:
            return function(original, *arguments, **options)

        setattr(owner, name, replacement)

    return substitute


def fix_cpu() -> None:
    """Apply the fixes that workers on CPUs need."""
    _repack_experts_on_update()
    _close_up_single_rows()
    _hold_generators_of_discarded_tokens()
    _cache_prompts_alone()
    _read_single_tokens_as_prompts()
    _expand_settings_to_drafts()
    _draft_for_marked_requests()
    _call_attention_directly()
    _allocate_at_edges_of_blocks()
    _draw_seeds_in_place()
    _append_sampled_logprobs()
    _copy_parameters_once()


def fix_gpu() -> None:
    """Apply the fixes that workers on GPUs need."""
    _sleep_beside_others()


def repack_tied_heads(model: torch.nn.Module) -> None:
    """Pack a tied head again. It has the embedding's weight and gets none of its own, so on CPUs vLLM 0.32
    keeps using the packing of the first load."""
    layers = [layer for layer in model.modules() if isinstance(layer, VocabParallelEmbedding)]
    embeddings = {id(layer.weight) for layer in layers if not isinstance(layer, ParallelLMHead)}
    for layer in layers:
        if isinstance(layer, ParallelLMHead) and id(layer.weight) in embeddings:
            layer.quant_method.process_weights_after_loading(layer)


@written_for("0.32")
def _repack_experts_on_update() -> None:
    """Make vLLM 0.32 (and 0.33) pack experts for its CPU kernels on weight updates, not only at the first
    load: `_setup_kernel` skips it, and the kernels then silently read plain weights as packed ones."""

    @replaces(UnquantizedFusedMoEMethod, "_setup_kernel")
    def setup_and_pack(setup_kernel: Any, self: Any, layer: Any, w13: torch.Tensor, w2: torch.Tensor) -> None:
        is_update = self.moe_kernel is not None
        setup_kernel(self, layer, w13, w2)
        if is_update:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)


@written_for("0.32")
def _close_up_single_rows() -> None:
    """Make vLLM 0.32 read a prompt of one token with Qwen3.5, whose queries, keys and values are a slice of a
    wider row: torch counts a single row as contiguous whatever its stride, and the convolution for CPUs
    refuses the stride."""

    @replaces(gdn_attention, "_causal_conv1d_fwd_cpu")
    def convolve_closed(convolve: Any, *, x: torch.Tensor, **options: Any) -> torch.Tensor:
        if x.shape[1] == 1:
            x = x.T.clone(memory_format=torch.contiguous_format).T
        return convolve(x=x, **options)


@written_for("0.32")
def _hold_generators_of_discarded_tokens() -> None:
    """Let vLLM 0.32 read a prompt in parts on CPUs. It samples a token after each part, discards it unless
    the part was the last, and then rewinds the request's generator by `set_offset`, which a CPU generator
    lacks. Here such a token is drawn from the generator of requests without a seed. This is the first model
    runner; the second one has no generators."""

    @replaces(CPUModelRunner, "sample_tokens")
    def sample_holding(sample_tokens: Any, self: Any, *arguments: Any) -> Any:
        generators = self.input_batch.generators
        discarded = np.flatnonzero(self.discard_request_mask.np[: self.input_batch.num_reqs])
        removed = {row: generators.pop(row) for row in discarded.tolist() if row in generators}
        try:
            return sample_tokens(self, *arguments)
        finally:
            generators.update(removed)


@written_for("0.32")
def _cache_prompts_alone() -> None:
    """Have vLLM 0.32 cache what a model with delta nets read as a prompt, and not what it wrote. Keys and
    values that were computed token by token differ in their last bits, and would take the place of those of
    the next turn's prompt. No hit is lost: delta nets keep states of prompts alone. Blocks are counted in the
    engine's core, which with one worker is this process."""

    @replaces(HybridKVCacheCoordinator, "cache_blocks")
    def cache_prompt(cache_blocks: Any, self: Any, request: Any, num_computed_tokens: int) -> None:
        if self.kv_cache_config.has_mamba_layers:
            num_computed_tokens = min(num_computed_tokens, request.num_prompt_tokens)
        cache_blocks(self, request, num_computed_tokens)


@written_for("0.32")
def _read_single_tokens_as_prompts() -> None:
    """Have vLLM 0.32 read the last token of a prompt by the kernels for prompts, if it is alone. For the
    cache of delta nets a prompt is cut at a multiple of 64, and a rest of one token would go to the kernels
    that sample, whose last bits are not those of a prompt that is read whole."""

    @replaces(GDNAttentionMetadataBuilder, "build")
    def build_prompts(build: Any, self: Any, prefix: int, batch: Any, *arguments: Any, **options: Any) -> Any:
        # a part is taken for a prompt if nothing was read before it
        if batch.is_prefilling is not None and batch.is_prefilling.any():
            read, seq_lens = batch.query_start_loc_cpu.diff(), batch.seq_lens_cpu_upper_bound
            single = batch.is_prefilling & (read == 1)
            batch = batch.replace(seq_lens_cpu_upper_bound=torch.where(single, read, seq_lens))
        return build(self, prefix, batch, *arguments, **options)


@written_for("0.32")
def _expand_settings_to_drafts() -> None:
    """Give drafted tokens their requests' temperature, top-k and top-p. On CPUs vLLM 0.32 writes them into a
    copy of another type and drops it (`_expand_kernel_impl`), and samples with what memory holds instead."""

    def expand(
        x: torch.Tensor,
        cu_num_tokens: torch.Tensor,
        num_tokens: int,
        replace_from: int = 0,
        replace_to: int = 0,
    ) -> torch.Tensor:
        counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
        return torch.where(x == replace_from, replace_to, x).to(x.dtype).repeat_interleave(counts)

    rejection_sampler.expand_batch_to_tokens = expand


@written_for("0.32")
def _draft_for_marked_requests() -> None:
    """Let requests decide by their mark (`MARK`) whether vLLM 0.32 drafts for them. It proposes
    nothing for a request without new tokens. This is the first model runner."""

    @replaces(CPUModelRunner, "propose_draft_token_ids")
    def propose_for_marked(propose: Any, self: Any, scheduled: Any, sampled: Any, *arguments: Any) -> Any:
        if self.speculative_config.method == "ngram":
            requests = [self.requests[name] for name in self.input_batch.req_ids]
            are_drafted = [(r.sampling_params.extra_args or {}).get(MARK, True) for r in requests]
            sampled = [ids if drafted else [] for ids, drafted in zip(sampled, are_drafted, strict=True)]
        return propose(self, scheduled, sampled, *arguments)


@written_for("0.32")
def _call_attention_directly() -> None:
    """Call attention as a function. As an operator of its own, which only compiled models need, it took
    a sixth of a decode step of the tiny dense model."""

    @replaces(CpuPlatform, "opaque_attention_op")
    def is_opaque(*_: Any) -> bool:
        return False


@written_for("0.32")
def _allocate_at_edges_of_blocks() -> None:
    """Let vLLM 0.32 look for a token's slot only where a block of the cache begins or ends. In between the
    block has room, nothing is cached or freed, and looking took a tenth of a decode step of a small model."""
    managers = {FullAttentionManager, MambaManager}

    @replaces(KVCacheManager, "allocate_slots")
    def allocate_at_edges(allocate: Any, self: Any, request: Any, num_new_tokens: int, **options: Any) -> Any:
        if (sizes := getattr(self, "sizes_of_blocks", None)) is None:
            groups = self.coordinator.single_type_managers
            is_served = {type(group) for group in groups} <= managers
            sizes = {group.block_size for group in groups} if is_served else set()
            self.sizes_of_blocks = sizes
        computed = request.num_computed_tokens
        is_inside = (
            num_new_tokens == 1
            and computed > request.num_prompt_tokens
            and options == {"num_lookahead_tokens": 0}  # a running request without drafts
            and bool(sizes)
            and all(1 < computed % size < size - 1 for size in sizes)
        )
        return self.empty_kv_cache_blocks if is_inside else allocate(self, request, num_new_tokens, **options)


@written_for("0.32")
def _draw_seeds_in_place() -> None:
    """Draw the seeds of a step's tokens into one tensor. vLLM 0.32 makes a tensor for each, reads it and
    copies it, which for 64 requests takes longer than sampling. The seeds are the same."""

    @replaces(TopKTopPSampler, "forward_cpu")
    def sample(forward: Any, self: Any, logits: torch.Tensor, generators: Any, k: Any, p: Any) -> Any:
        if self.use_fp64_gumbel or self.logprobs_mode != "processed_logprobs":
            return forward(self, logits, generators, k, p)
        logits = apply_top_k_top_p(logits, k, p).float()
        seeds = torch.randint(0, 2**31, (len(logits),))
        rows = seeds.unbind()
        for row, generator in generators.items():
            rows[row].random_(0, 2**31, generator=generator)
        return torch.ops._C.fused_gumbel_argmax(logits, seeds), logits.log_softmax(-1)


@written_for("0.32")
def _append_sampled_logprobs() -> None:
    """Append the log-prob of a sampled token where no others are asked for and no text is made of it,
    without the iterators that vLLM 0.32 builds for both."""

    @replaces(LogprobsProcessor, "_update_sample_logprobs")
    def append(update: Any, self: Any, lists: Any) -> None:
        flat = self.logprobs
        if self.num_logprobs or self.tokenizer is not None or not isinstance(flat, FlatLogprobs):
            update(self, lists)
            return
        ids, values, ranks, _ = lists
        for position in range(len(ranks)):
            first, value = len(flat.logprobs), values.item(position, 0)
            flat.start_indices.append(first)
            flat.end_indices.append(first + 1)
            flat.token_ids.append(ids.item(position, 0))
            flat.logprobs.append(value)
            flat.ranks.append(ranks.item(position))
            flat.decoded_tokens.append(None)
            self.cumulative_logprob += value


@written_for("0.32")
def _copy_parameters_once() -> None:
    """Copy a request's parameters without what they contain. They are made for that request alone, and vLLM
    0.32 took a quarter of the time of a submission for a deep copy."""

    @replaces(SamplingParams, "clone")
    def copy_of(_: Any, self: Any) -> Any:
        return copy(self)


@written_for("0.32")
def _sleep_beside_others() -> None:
    """Let a worker sleep while another process takes memory of its GPU. vLLM compares the free memory of the
    whole device before and after, and takes a loss for its own failure when its memory is free already."""

    @replaces(Worker, "sleep")
    def sleep_beside_others(sleep: Any, self: Any, level: int = 1) -> None:
        try:
            sleep(self, level)
        except AssertionError as error:
            if str(error) != GREW:
                raise
            log.warning("another process took memory of the GPU while its engine went to sleep")


@written_for("0.32")
def take_updates_whole() -> None:
    """Make all of gpt-oss pass through vLLM's loaders."""

    @replaces(GptOssForCausalLM, "load_weights")
    def load_by_loaders(load_weights: Any, self: Any, weights: Weights) -> set[str]:
        sinks: set[str] = set()
        return load_weights(self, _split_experts(self, weights, sinks)) | sinks


def _split_experts(model: Any, weights: Weights, loaded: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights with one tensor per expert and without sinks, which are loaded here."""
    for name, tensor in weights:
        if name.endswith(EXPERTS):
            prefix, _, kind = name.rpartition(".")
            for expert in range(tensor.shape[0]):
                yield f"{prefix}.{expert}.{kind}", tensor[expert]
        elif name.endswith(SINKS):
            loaded |= _load_sinks(model, name.replace(".self_attn.", ".attn."), tensor)
        else:
            yield name, tensor


def _load_sinks(model: Any, name: str, sinks_H: torch.Tensor) -> set[str]:
    """Load the sinks of this worker's heads. Return the name of their parameter, or nothing where another
    worker has the layer."""
    parameter = dict(model.named_parameters()).get(name)
    if parameter is None:
        return set()
    heads = parameter.shape[0]
    local_sinks = sinks_H.narrow(0, get_tensor_model_parallel_rank() * heads, heads)
    getattr(parameter, "weight_loader", default_weight_loader)(parameter, local_sinks)
    return {name}


@written_for("0.32")
def take_norm_kernels() -> None:
    """Make RMS norms that are built on CPUs from now on call vLLM's own kernel. Its CPU layers take seven or
    more operations of torch for each, which were 9 to 15 % of a decode step of a small model."""
    classes: list[tuple[Any, Any]] = [(RMSNorm, _normalize), (GemmaRMSNorm, _normalize_around_one)]
    for norm_class, forward in classes:
        norm_class.forward_cpu = forward


def _normalize(norm: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> Normalized:
    if not norm.has_weight or norm.variance_size_override is not None:
        return norm.forward_native(x, residual)
    return _rms_norm(x, residual, norm.weight.float(), norm.variance_epsilon)


def _normalize_around_one(norm: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> Normalized:
    return _rms_norm(x, residual, norm.weight.float() + 1.0, norm.variance_epsilon)


def _rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, epsilon: float
) -> Normalized:
    """Normalize in float32, as vLLM's layers do: in bfloat16 the kernels would round the sums. They take rows
    without gaps, and write over a residual and what is added to it, as vLLM's layer for GPUs does."""
    rows = x.float().contiguous()
    if residual is None:
        output = torch.empty_like(rows)
        torch.ops._C.rms_norm(output, rows, weight, epsilon)
        return output.to(x.dtype)
    sums = residual.float().contiguous()
    torch.ops._C.fused_add_rms_norm(rows, sums, weight, epsilon)
    return rows.to(x.dtype), sums.to(x.dtype)
