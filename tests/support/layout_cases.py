"""The loss under tensor and context parallelism over gloo equals that of one process, for either backend."""

import torch
import torch.distributed as dist

from megatron_ibpo.loss import Variant
from megatron_ibpo.loss.packed_rows import response_positions
from support.kernel_cases import make_batch, options_for
from support.loss_calls import loss_of_logits

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


def one_loss(batch, variant, backend):
    logits = batch["logits_NV"].clone().requires_grad_()
    options = {**options_for(variant), "kl": "k3", "kl_coef": 0.3, "temperature": 0.9, "backend": backend}
    loss, stats = loss_of_logits(**{**batch, "logits_NV": logits}, **options)
    (2 * loss).backward()
    shown = ("logprobs_N", "entropy_N", "mean_log_ratio_S", "kl_N", "clipped")
    found = {name: getattr(stats, name) for name in shown}
    return found | {"loss": loss.detach(), "gradient": logits.grad}


def context_rows(part, cp):
    """Rows of one context-parallel rank as Megatron deals them: chunks `part` and 2·cp-1-part of each."""
    rows = []
    for own in torch.arange(sum(LENGTHS)).split(LENGTHS):
        chunks = own.chunk(2 * cp) if len(own) else ()
        rows += [chunk for number, chunk in enumerate(chunks) if number in (part, 2 * cp - 1 - part)]
    return torch.cat(rows)


def check_layout(world, backend, tp, cp, variants, **more):
    """On each rank of a tp × cp layout, tensor-parallel ranks next to each other; `more` of the batch."""
    tensor_groups = [dist.new_group(list(range(first, first + tp))) for first in range(0, tp * cp, tp)]
    context_groups = [dist.new_group(list(range(first, tp * cp, tp))) for first in range(tp)]
    part, place = divmod(world.rank, tp)
    whole, rows = batch_for_ranks() | more, context_rows(part, cp)
    positions_N = response_positions(whole["response_mask_N"], whole["cu_seqlens"])
    batch = whole | {"positions_N": positions_N}
    batch |= {name: value[rows] for name, value in batch.items() if name.endswith(("_N", "_NV"))}
    width = -(-VOCAB // tp)
    first, last = place * width, min((place + 1) * width, VOCAB)
    shard = torch.full((len(rows), width), 77.0)  # padding that must not count
    shard[:, : last - first] = batch["logits_NV"][:, first:last]
    batch |= {"logits_NV": shard, "tp_group": tensor_groups[part], "vocab_range": (first, last)}
    batch["cp_group"] = context_groups[place] if cp > 1 else None
    for variant in variants:
        found, expected = one_loss(batch, variant, backend), one_loss(whole, variant, "torch")
        assert not found["gradient"][:, last - first :].any()
        found["gradient"] = found["gradient"][:, : last - first]
        expected["gradient"] = expected["gradient"][:, first:last]
        for name, value in expected.items():
            own = value[rows] if value.dim() and len(value) == sum(LENGTHS) else value
            torch.testing.assert_close(found[name], own, atol=3e-6, rtol=3e-6, msg=f"{variant}: {name}")
        same: list = [None] * world.size
        dist.all_gather_object(same, [found[name].tolist() for name in ("loss", "mean_log_ratio_S")])
        assert same == [same[0]] * world.size, f"{variant}: the same bits everywhere"
