"""Runs of decode steps on CPUs. For each token of a small model, vLLM's scheduler and its bookkeeping take as
long as the model itself. Here one turn of the scheduler samples several tokens of each running request."""

import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.forward_context import ForwardContext, get_forward_context, override_forward_context
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, MambaManager
from vllm.v1.outputs import LogprobsLists

from megatron_ibpo.engines.vllm.fixes import written_for

LONGEST_S = 0.5
"""Seconds after which a run ends. Where it takes them, the model takes most of the time anyway."""


class DecodeRuns:
    """Lets a vLLM engine in this process sample up to `longest` tokens of each request per step.

    A step that reads one token of each request, while none waits, is followed by others of the requests that
    have not ended. Their tokens lie in the same blocks of the cache, so that only ids, positions and lengths
    change. A run ends at the edge of a block, or when `is_interrupted` says so. Tokens and log-probs are
    those of single steps, and vLLM is told what it would be told of drafted tokens that were all accepted.
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
        """Return how many tokens may follow this step's before a request needs another block."""
        scheduler, running = self._scheduler, self._scheduler.running
        reads = (len(scheduled.scheduled_cached_reqs.req_ids), scheduled.total_num_scheduled_tokens)
        _, num_waiting = scheduler.get_request_counts()
        if num_waiting or scheduled.scheduled_new_reqs or reads != (len(running), len(running)):
            return 0
        computed = [request.num_computed_tokens for request in running]  # after this step
        if any(request.num_tokens > num for request, num in zip(running, computed, strict=True)):
            return 0  # some of a prompt remains
        return min(self.longest - 1, *(-num % size for size in self._block_sizes for num in computed))

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
        runner, context, positions = self._runner, self._context, self._inputs["positions"]
        sampling = runner.input_batch.sampling_metadata
        left_N = torch.tensor([self._left(name) for name in runner.input_batch.req_ids])
        ids = torch.tensor(output.sampled_token_ids, dtype=torch.int32)[:, 0]
        rows = torch.arange(len(ids))
        run = _Run(len(ids), self._most_tokens)
        run.add(
            rows, ids, *map(torch.from_numpy, (output.logprobs.logprobs, output.logprobs.sampled_token_ranks))
        )
        deadline = time.monotonic() + LONGEST_S
        while run.length < self._most_tokens and time.monotonic() < deadline and not self._is_interrupted():
            goes_on = ~torch.isin(ids, self._stop_ids) & (left_N[rows] > run.length)
            chosen = goes_on.nonzero()[:, 0]
            if not len(chosen):
                break
            if len(chosen) < len(rows):
                rows, ids, positions = rows[chosen], ids[chosen], positions[..., chosen]
                sampling = _sampling_of(sampling, chosen)
            context, positions = self._one_token_later(context, chosen), positions + 1
            with override_forward_context(context):
                hidden = self._forward(**self._inputs | {"input_ids": ids, "positions": positions})
                logits = runner.model.compute_logits(hidden)
            sampled = runner.sampler(logits=logits, sampling_metadata=sampling)
            ids, lists = sampled.sampled_token_ids[:, 0], sampled.logprobs_tensors
            run.add(rows, ids, lists.logprobs, lists.selected_token_ranks)
        self.num_tokens = run.length
        token_ids = run.token_ids()
        self._remember(run, token_ids)
        return replace(output, sampled_token_ids=token_ids, logprobs=run.logprobs())

    def _left(self, name: str) -> int:
        """Return how many tokens a request may have, this step's among them."""
        request = self._scheduler.requests[name]
        room = self._scheduler.max_model_len - request.num_tokens
        return min(request.max_tokens - request.num_output_tokens, room)

    def _one_token_later(self, context: Any, rows: Tensor) -> ForwardContext:
        """Return the `ForwardContext` of the token after this one of these requests of a batch."""
        metadata, slots = dict(context.attn_metadata), dict(context.slot_mapping)
        for group in self._groups:
            builder, now = group.get_metadata_builder(), metadata[group.layer_names[0]]
            if isinstance(builder, GDNAttentionMetadataBuilder):  # each keeps the slot of its state
                later: Any = replace(
                    now,
                    num_decodes=len(rows),
                    num_decode_tokens=len(rows),
                    num_actual_tokens=len(rows),
                    non_spec_query_start_loc=now.non_spec_query_start_loc[: len(rows) + 1],
                    non_spec_state_indices_tensor=now.non_spec_state_indices_tensor[rows],
                )
            else:
                batch: Any = SimpleNamespace(
                    num_reqs=len(rows),
                    num_actual_tokens=len(rows),
                    max_query_len=1,
                    max_seq_len=now.max_seq_len + 1,
                    query_start_loc=now.query_start_loc[: len(rows) + 1],
                    seq_lens=now.seq_lens[rows] + 1,
                    block_table_tensor=now.block_table[rows],
                    slot_mapping=now.slot_mapping[rows] + 1,
                    causal=now.causal,
                )
                later = builder.build(0, batch)
                slots |= dict.fromkeys(group.layer_names, later.slot_mapping)
            metadata |= dict.fromkeys(group.layer_names, later)
        padding = context.is_padding[: len(rows)]
        return replace(
            context, attn_metadata=metadata, slot_mapping=slots, is_padding=padding, moe_layer_index=0
        )

    def _remember(self, run: "_Run", token_ids: list[list[int]]) -> None:
        """Have the runner know the tokens after the first too, as it knows that one."""
        batch = self._runner.input_batch
        rows, steps = run.sampled_NT[:, 1:].nonzero()
        places = batch.num_tokens_no_spec[rows] + steps
        batch.token_ids_cpu[rows, places] = run.ids_NT[rows, steps + 1]
        batch.is_token_ids[rows, places] = True
        batch.num_tokens_no_spec[: len(run.ids_NT)] += run.sampled_NT[:, 1:].sum(1)
        for name, ids in zip(batch.req_ids, token_ids, strict=True):
            self._runner.requests[name].output_token_ids.extend(ids[1:])

    def _update_from_run(self, scheduled: Any, output: Any) -> Any:
        if self.num_tokens > 1:
            for name, ids in zip(output.req_ids, output.sampled_token_ids, strict=True):
                self._scheduler.requests[name].num_computed_tokens += len(ids) - 1
        return self._update(scheduled, output)


class _Run:
    """The tokens of a run of N requests. Those after a request's last are not defined."""

    def __init__(self, num_rows: int, most_tokens: int) -> None:
        self.length = 0
        """Tokens of the requests that have most."""
        self.sampled_NT = np.zeros((num_rows, most_tokens), bool)
        self.ids_NT = np.zeros((num_rows, most_tokens), np.int32)
        self._logprobs_NT = np.zeros((num_rows, most_tokens), np.float32)
        self._ranks_NT = np.zeros((num_rows, most_tokens), np.int64)

    def add(self, rows: Tensor, ids: Tensor, logprobs: Tensor, ranks: Tensor) -> None:
        """Add the next token of each of these requests, with its log-prob and its rank in columns."""
        place = (rows.numpy(), self.length)
        self.sampled_NT[place] = True
        self.ids_NT[place], self._ranks_NT[place] = ids, ranks.reshape(-1)
        self._logprobs_NT[place] = logprobs[:, 0]
        self.length += 1

    def token_ids(self) -> list[list[int]]:
        return [ids[:num].tolist() for ids, num in zip(self.ids_NT, self.sampled_NT.sum(1), strict=True)]

    def logprobs(self) -> LogprobsLists:
        sampled = self.sampled_NT
        ends = sampled.sum(1).cumsum().tolist()
        columns = (self.ids_NT[sampled][:, None], self._logprobs_NT[sampled][:, None])
        return LogprobsLists(*columns, self._ranks_NT[sampled], [0, *ends])


def _sampling_of(sampling: Any, rows: Tensor) -> Any:
    """Return what vLLM's sampler needs to know of these requests of a batch."""
    settings = {
        name: None if (values := getattr(sampling, name)) is None else values[rows]
        for name in ("temperature", "top_p", "top_k")
    }
    places = enumerate(rows.tolist())
    generators = {new: sampling.generators[old] for new, old in places if old in sampling.generators}
    return replace(sampling, generators=generators, **settings)
