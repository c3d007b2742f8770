"""The loss under tensor and context parallelism over gloo equals that of one process, for either backend."""

import torch
import torch.distributed as dist

from megatron_ibpo.loss import Variant
from megatron_ibpo.loss.packed_rows import response_positions
from support.kernel_cases import make_batch, options_for
from support.loss_calls import loss_of_logits
from support.ranks import run_ranks

LENGTHS = (8, 4, 0, 12)
VOCAB = 133


def by_place(log_ratio, advantages, lengths, positions):
    return -log_ratio.exp() * advantages * (positions + 1.0) / lengths, positions > 2


BY_PLACE = Variant(token_term=by_place)
BY_PLACE_NAME = "support.layout_cases:BY_PLACE"


def batch_for_ranks():
    batch = make_batch("cpu", lengths=LENGTHS, vocab=VOCAB)
    generator = torch.Generator().manual_seed(5)
    batch["token_weights_N"] = torch.rand(sum(LENGTHS), generator=generator)
    batch["ref_logprobs_N"] = batch["old_logprobs_N"] + 0.1
    batch["sequence_weights_S"] = torch.rand(len(LENGTHS), generator=generator)
    return batch


def one_loss(batch, variant, backend, **layout):
    logits = batch["logits_NV"].clone().requires_grad_()
    options = {**options_for(variant), "kl": "k3", "kl_coef": 0.3, "temperature": 0.9, "backend": backend}
    loss, stats = loss_of_logits(**{**batch, "logits_NV": logits}, **options, **layout)
    (2 * loss).backward()
    shown = ("logprobs_N", "entropy_N", "mean_log_ratio_S", "kl_N", "clipped")
    found = {name: getattr(stats, name) for name in shown}
    return found | {"loss": loss.detach(), "gradient": logits.grad}


def on_one_rank(world, backend, tp, cp, variants):
    """Results by variant on this rank of a tp × cp layout, tensor-parallel ranks next to each other."""
    tensor_groups = [dist.new_group(list(range(first, first + tp))) for first in range(0, tp * cp, tp)]
    context_groups = [dist.new_group(list(range(first, tp * cp, tp))) for first in range(tp)]
    part, place = divmod(world.rank, tp)
    batch = batch_for_ranks()
    batch["positions_N"] = response_positions(batch["response_mask_N"], batch["cu_seqlens"])
    rows = context_rows(part, cp)
    batch |= {name: value[rows] for name, value in batch.items() if name.endswith(("_N", "_NV"))}
    width = -(-VOCAB // tp)
    first, last = place * width, min((place + 1) * width, VOCAB)
    shard = torch.full((len(rows), width), 77.0)  # padding that must not count
    shard[:, : last - first] = batch["logits_NV"][:, first:last]
    layout = {"tp_group": tensor_groups[part], "vocab_range": (first, last)}
    layout["cp_group"] = context_groups[place] if cp > 1 else None
    return {name: one_loss(batch | {"logits_NV": shard}, name, backend, **layout) for name in variants}


def context_rows(part, cp):
    """Rows of one context-parallel rank as Megatron deals them: chunks `part` and 2·cp-1-part of each."""
    rows = []
    for own in torch.arange(sum(LENGTHS)).split(LENGTHS):
        chunks = own.chunk(2 * cp) if len(own) else ()
        rows += [chunk for number, chunk in enumerate(chunks) if number in (part, 2 * cp - 1 - part)]
    return torch.cat(rows)


def check_layout(backend, tp, cp, variants):
    ranks = run_ranks(on_one_rank, tp * cp, backend, tp, cp, variants, timeout=280)
    for variant in variants:
        expected = one_loss(batch_for_ranks(), variant, "torch")
        for result in ranks:  # the same bits everywhere
            for name in ("loss", "mean_log_ratio_S"):
                assert torch.equal(result[variant][name], ranks[0][variant][name]), (variant, name)
        found = {name: torch.empty_like(value) for name, value in expected.items()}
        for part in range(cp):
            rows = context_rows(part, cp)
            shards = [result[variant] for result in ranks[part * tp : (part + 1) * tp]]
            whole = torch.cat([shard["gradient"] for shard in shards], 1)
            assert not whole[:, VOCAB:].any()
            found["gradient"][rows] = whole[:, :VOCAB]
            for name, value in shards[0].items():
                if expected[name].shape == expected["logprobs_N"].shape:
                    found[name][rows] = value
                elif name != "gradient":
                    found[name] = value
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, atol=3e-6, rtol=3e-6, msg=f"{variant}: {name}")
