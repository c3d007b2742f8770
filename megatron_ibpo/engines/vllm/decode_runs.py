"""Runs of decode steps on CPUs. For each token of a small model, vLLM's scheduler and its bookkeeping take as
long as the model itself. Here one turn of the scheduler samples several tokens of each running request."""

import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.forward_context import ForwardContext, get_forward_context, override_forward_context
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, MambaManager
from vllm.v1.outputs import LogprobsLists

from megatron_ibpo.basics.records import TokenIds
from megatron_ibpo.engines.vllm.fixes import written_for

MOST_ENDED = 1 / 8
"""Share of a batch's requests that may have ended before a run does. They are computed in vain until then."""
LONGEST_S = 0.5
"""Seconds after which a run ends. Where it takes them, the model takes most of the time anyway."""


class DecodeRuns:
    """Lets a vLLM engine in this process sample up to `longest` tokens of each request per step.

    A step that reads one token of each request, while none waits, is followed by others of the same batch.
    Their tokens lie in the same blocks of the cache, so that only ids, positions and lengths change. A run
    ends at the edge of a block, where a request reaches its length, or when `is_interrupted` says so. Tokens
    and log-probs are those of single steps, and vLLM is told what it would be told of drafted tokens that
    were all accepted.
    """

    def __init__(
        self, core: Any, stop_ids: tuple[int, ...], longest: int, is_interrupted: Callable[[], bool]
    ) -> None:
        """`core` is vLLM's `EngineCore`, with its only worker in this process. No request has penalties, and
        each ends at its own length or at one of `stop_ids`. Other engines keep their single steps: those that
        draft, and those with layers of other kinds than attention and gated delta nets."""
        self.longest = longest
        self.num_tokens = 1
        """Tokens of each request that the last step has sampled."""
        self._scheduler = core.scheduler
        self._runner = core.model_executor.driver_worker.worker.model_runner
        self._is_interrupted = is_interrupted
        self._stop_ids = torch.tensor(stop_ids, dtype=torch.int32)
        self._most_tokens = 1
        managers = self._scheduler.kv_cache_manager.coordinator.single_type_managers
        self._block_sizes = {manager.block_size for manager in managers}
        self._groups = [group for groups in self._runner.attn_groups for group in groups]
        builders = {type(group.get_metadata_builder()) for group in self._groups}
        if (
            self._runner.speculative_config is None
            and {type(manager) for manager in managers} <= {FullAttentionManager, MambaManager}
            and builders <= {CPUAttentionMetadataBuilder, GDNAttentionMetadataBuilder}
        ):
            written_for("0.32")(self._take_over)()

    def _take_over(self) -> None:
        scheduler, runner = self._scheduler, self._runner
        self._schedule, self._update = scheduler.schedule, scheduler.update_from_output
        self._forward, self._sample = runner._model_forward, runner.sample_tokens
        scheduler.schedule, scheduler.update_from_output = self._schedule_run, self._update_from_run
        runner._model_forward, runner.sample_tokens = self._forward_and_keep, self._sample_run

    def _schedule_run(self, *arguments: Any) -> Any:
        scheduled = self._schedule(*arguments)
        self.num_tokens, self._most_tokens = 1, 1 + self._room(scheduled)
        return scheduled

    def _room(self, scheduled: Any) -> int:
        """Return how many tokens may follow this step's before something else changes than their number."""
        scheduler, running = self._scheduler, self._scheduler.running
        reads = (len(scheduled.scheduled_cached_reqs.req_ids), scheduled.total_num_scheduled_tokens)
        _, num_waiting = scheduler.get_request_counts()
        if num_waiting or scheduled.scheduled_new_reqs or reads != (len(running), len(running)):
            return 0
        room = self.longest - 1
        for request in running:
            computed = request.num_computed_tokens  # after this step
            if computed < request.num_tokens:  # some of its prompt remains
                return 0
            left = min(request.max_tokens - request.num_output_tokens, scheduler.max_model_len - computed) - 1
            room = min(room, left, *(-computed % size for size in self._block_sizes))
        return room

    def _forward_and_keep(self, **inputs: Any) -> Any:
        self._context, self._inputs = get_forward_context(), inputs
        return self._forward(**inputs)

    def _sample_run(self, grammar: Any) -> Any:
        output = self._sample(grammar)
        goes_on = self._most_tokens > 1 and self._inputs["inputs_embeds"] is None
        return self._go_on(output) if goes_on else output

    @torch.inference_mode()
    def _go_on(self, output: Any) -> Any:
        """Sample further tokens after those of this output; return the output of all."""
        context, positions = self._context, self._inputs["positions"]
        ids = torch.tensor(output.sampled_token_ids, dtype=torch.int32)[:, 0]
        logprobs, ranks = output.logprobs.logprobs[:, 0], output.logprobs.sampled_token_ranks
        tokens = [(ids, torch.from_numpy(logprobs), torch.from_numpy(ranks))]
        have_ended = torch.isin(ids, self._stop_ids)
        deadline = time.monotonic() + LONGEST_S
        while (
            len(tokens) < self._most_tokens
            and int(have_ended.sum()) <= MOST_ENDED * len(ids)
            and time.monotonic() < deadline
            and not self._is_interrupted()
        ):
            context, positions = self._one_token_later(context), positions + 1
            with override_forward_context(context):
                hidden = self._forward(**self._inputs | {"input_ids": ids, "positions": positions})
                logits = self._runner.model.compute_logits(hidden)
            sampled = self._runner._sample(logits, None)
            ids, lists = sampled.sampled_token_ids[:, 0], sampled.logprobs_tensors
            tokens.append((ids, lists.logprobs[:, 0], lists.selected_token_ranks))
            have_ended |= torch.isin(ids, self._stop_ids)
        self.num_tokens = len(tokens)
        ids_NT, logprobs_NT, ranks_NT = (torch.stack(parts, 1).numpy() for parts in zip(*tokens, strict=True))
        self._remember(ids_NT[:, 1:])
        starts = list(range(0, ids_NT.size + 1, len(tokens)))
        lists = LogprobsLists(ids_NT.reshape(-1, 1), logprobs_NT.reshape(-1, 1), ranks_NT.reshape(-1), starts)
        return replace(output, sampled_token_ids=ids_NT.tolist(), logprobs=lists)

    def _one_token_later(self, context: Any) -> ForwardContext:
        """Return the `ForwardContext` of the token after this one of each request. Delta nets keep theirs."""
        metadata, slots = dict(context.attn_metadata), dict(context.slot_mapping)
        for group in self._groups:
            builder, now = group.get_metadata_builder(), metadata[group.layer_names[0]]
            if isinstance(builder, GDNAttentionMetadataBuilder):
                continue
            batch: Any = SimpleNamespace(
                num_reqs=len(now.seq_lens),
                num_actual_tokens=now.num_actual_tokens,
                max_query_len=now.max_query_len,
                max_seq_len=now.max_seq_len + 1,
                query_start_loc=now.query_start_loc,
                seq_lens=now.seq_lens + 1,
                block_table_tensor=now.block_table,
                slot_mapping=now.slot_mapping + 1,
                causal=now.causal,
            )
            later = builder.build(0, batch)
            metadata |= dict.fromkeys(group.layer_names, later)
            slots |= dict.fromkeys(group.layer_names, later.slot_mapping)
        return replace(context, attn_metadata=metadata, slot_mapping=slots, moe_layer_index=0)

    def _remember(self, ids_NT: TokenIds) -> None:
        """Have the runner know these tokens too, as it knows that of a single step."""
        batch, (num_rows, num_tokens) = self._runner.input_batch, ids_NT.shape
        rows = np.arange(num_rows)[:, None]
        places_NT = batch.num_tokens_no_spec[:num_rows, None] + np.arange(num_tokens)
        batch.token_ids_cpu[rows, places_NT] = ids_NT
        batch.is_token_ids[rows, places_NT] = True
        batch.num_tokens_no_spec[:num_rows] += num_tokens
        for name, ids in zip(batch.req_ids, ids_NT.tolist(), strict=True):
            self._runner.requests[name].output_token_ids.extend(ids)

    def _update_from_run(self, scheduled: Any, output: Any) -> Any:
        for name in scheduled.num_scheduled_tokens if self.num_tokens > 1 else ():
            self._scheduler.requests[name].num_computed_tokens += self.num_tokens - 1
        return self._update(scheduled, output)
