"""The multi-token prediction layer beside the policy. Gradients are read off weights, as in test_trainer."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megatron_ibpo.engines.vllm.settings import drafts_with_mtp
from megatron_ibpo.models import check_layout, read_hf_config
from megatron_ibpo.policy.logits_check import tensor_per_expert
from megatron_ibpo.weights import CheckpointError
from megatron_ibpo.weights.formats.convert import megatron_to_hf
from support import planned
from support.checkpoint_bytes import assert_same_bytes, tensors_of, with_mtp, with_weights
from support.layouts import layout
from support.tiny_models import MIXED, make_qwen3, make_qwen3_5, make_qwen3_next
from support.train_sequences import sequences
from support.trainers import EPSILON, LR, close_trainer, config_for, one_update, open_trainer, weights_of

pytestmark = pytest.mark.world


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models")
    hybrid = make_qwen3_next(directory / "next", 4, std=0.1)
    tied = make_qwen3_5(directory / "3.5", 5, std=0.1, tie=True)
    return {"next": with_mtp(hybrid, seed=6), "3.5": with_mtp(tied, seed=6)}


def mtp_config(parallel, *, mtp=1, factor=1.0, clip_grad=1e9, **others):
    config = config_for(parallel, **others)
    model = replace(config.model, mtp_num_layers=mtp, mtp_loss_scaling_factor=factor)
    return replace(config, model=model, optimizer=replace(config.optimizer, clip_grad=clip_grad))


def rows_with_tools():
    """Uneven responses, one with a hole where a tool spoke, one of a single token, and one whose prompt is a
    single token."""
    rows = sequences()
    rows[1].loss_mask[2:4] = False
    single = {"response_token_ids": rows[2].response_token_ids[:1], "loss_mask": np.ones(1, bool)}
    rows[2] = replace(rows[2], **single, rollout_logprobs=rows[2].rollout_logprobs[:1], token_weights=None)
    rows[3] = replace(rows[3], prompt_token_ids=rows[3].prompt_token_ids[:1])
    return [replace(row, advantage=row.advantage or 0.5) for row in rows]  # without one none is trained on


def plain_formula(hf_dir, rows, directory):
    """(mean loss, share of tokens that are the likeliest, gradients by checkpoint name), in plain torch and
    transformers' own layers, each sequence on its own. The order of embedding and hidden state is vLLM's
    (`qwen3_next_mtp.py`)."""
    from transformers import AutoModelForCausalLM

    drawn, inner = tensors_of(hf_dir), f"model.layers.{MIXED}."
    swapped = {n: t for n, t in drawn.items() if not n.startswith(("mtp.", inner))}
    swapped |= {n.replace("mtp.layers.0.", inner): t for n, t in drawn.items() if "mtp.layers." in n}
    how: dict = {"attn_implementation": "eager", "experts_implementation": "eager", "dtype": torch.float32}
    policy = AutoModelForCausalLM.from_pretrained(hf_dir, **how)
    model = AutoModelForCausalLM.from_pretrained(with_weights(hf_dir, directory, swapped), **how).model
    layer, rotary = model.layers[MIXED], model.rotary_emb
    own = {n: drawn[n].requires_grad_() for n in drawn if n.startswith("mtp.") and "layers" not in n}

    def norm(x, name):
        return F.rms_norm(x, x.shape[-1:], eps=model.config.rms_norm_eps) * (1 + own[name])

    losses, hits = [], []
    for row in rows:
        ids = torch.from_numpy(np.concatenate([row.prompt_token_ids, row.response_token_ids])).long()[None]
        sampled = torch.from_numpy(np.concatenate([np.zeros(len(row.prompt_token_ids), bool), row.loss_mask]))
        with torch.no_grad():
            hidden = policy.model(ids[:, :-1]).last_hidden_state
            embedded = policy.model.embed_tokens(ids[:, 1:])
        embedded = norm(embedded, "mtp.pre_fc_norm_embedding.weight")
        hidden = norm(hidden, "mtp.pre_fc_norm_hidden.weight")
        x = F.linear(torch.cat((embedded, hidden), dim=-1), own["mtp.fc.weight"])
        length = x.shape[1]
        future = torch.full((length, length), -torch.inf).triu(1)[None, None]
        places = torch.arange(length)[None]
        x = layer(x, position_embeddings=rotary(x, places), attention_mask=future)
        x = norm(x[0] if isinstance(x, tuple) else x, "mtp.norm.weight")
        logits = F.linear(x, policy.lm_head.weight.detach())[0, :-1]
        labels, drafted = ids[0, 2:], sampled[1:-1] & sampled[2:]
        losses.append(F.cross_entropy(logits[drafted], labels[drafted], reduction="none"))
        hits.append((logits.argmax(-1) == labels)[drafted])
    loss = torch.cat(losses).mean()
    loss.backward()
    named = {name: p.grad for name, p in layer.named_parameters()}
    inside = {f"mtp.layers.0.{name}": g for name, g in tensor_per_expert(named)}
    return loss.item(), torch.cat(hits).float().mean().item(), {n: t.grad for n, t in own.items()} | inside


@pytest.fixture(scope="module")
def expected(checkpoints, tmp_path_factory):
    rows, directory = rows_with_tools(), tmp_path_factory.mktemp("swapped")
    return {name: plain_formula(path, rows, directory / name) for name, path in checkpoints.items()}


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        (1, [("next", layout(), {}), ("3.5", layout(), {}),
             ("next", layout(), {"factor": 0.25, "max_tokens": 60, "fuse_lm_head": True})]),
        pytest.param(2, [
            ("next", layout(tp=2, ep=2), {}), ("next", layout(ep=2, distributed_optimizer=True), {}),
            ("3.5", layout(tp=2), {})], marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_loss_and_gradients_are_those_of_the_plain_formula(world, checkpoints, expected, ranks, cases):
    for case in cases:
        name, parallel, others = case
        loss, acceptance, gradients = expected[name]
        config, factor = mtp_config(parallel, **others), others.get("factor", 1.0)
        before, after, metrics = one_update(world, checkpoints[name], config, rows_with_tools())
        norm = sum(g.double().square().sum() for g in gradients.values()).sqrt().item()
        assert {*world.all_gather(metrics["mtp_loss"])} == {metrics["mtp_loss"]}, case
        assert metrics["mtp_loss"] == pytest.approx(loss, rel=1e-5), case
        assert metrics["mtp_acceptance"] == pytest.approx(acceptance), case
        assert metrics["mtp_updates_skipped"] == 0, case
        assert metrics["mtp_grad_norm"] / factor == pytest.approx(norm, rel=1e-4), case
        if world.is_rank_0:
            assert {name for name in after if name.startswith("mtp.")} == gradients.keys(), case
            for name, gradient in gradients.items():
                assert gradient.abs().max() > 0, (case, name, "would not be tested")
                given = (before[name] - after[name]) * (EPSILON / LR / factor)
                assert (given - gradient).abs().max() < 2e-4 * norm, (case, name)


@pytest.mark.world(2)
def test_mtp_leaves_the_policy_bit_for_bit_and_learns(world, checkpoints):
    """The gradient norm clips, and is of the policy's gradients alone."""
    runs = []
    for mtp in (0, 1):
        config = mtp_config(layout(tp=2, ep=2), mtp=mtp, lr=1e-2, eps_adam=1e-8, clip_grad=1e-3)
        trainer, export, _ = open_trainer(world, checkpoints["next"], config)
        before, metrics = weights_of(export), [planned.update(trainer, sequences()) for _ in range(3)]
        runs.append((before, weights_of(export), metrics))
        close_trainer()
    (_, without, alone), (origin, beside, metrics) = runs
    assert_same_bytes({n: t for n, t in beside.items() if not n.startswith("mtp.")}, without)
    assert all(not torch.equal(beside[n], origin[n]) for n in beside if n.startswith("mtp."))
    assert [m["grad_norm"] for m in metrics] == [m["grad_norm"] for m in alone]
    assert not any("mtp" in name for m in alone for name in m)
    first, _, last = (m["mtp_loss"] for m in metrics)
    assert last < first - 0.1


@pytest.mark.slow
@pytest.mark.world(2)
def test_a_resumed_mtp_layer_continues_exactly_and_is_always_exported(world, checkpoints, tmp_path):
    from megatron_ibpo.policy.checkpoint import load_checkpoint
    from megatron_ibpo.policy.saving import save_checkpoint
    from megatron_ibpo.weights.formats.hf_models import save_hf

    hf_dir, rows = checkpoints["next"], sequences(6)

    def trainer(mtp):
        config = mtp_config(layout(ep=2, distributed_optimizer=True), mtp=mtp, lr=1e-3, eps_adam=1e-8)
        config.model.hf_checkpoint = hf_dir
        return open_trainer(world, hf_dir, config)[:2]

    def went_on(own, export):
        metrics, weights = planned.update(own, rows), weights_of(export)
        close_trainer()
        return metrics | {"seconds_old_logprobs": 0}, weights

    saved = []
    for mtp in (0, 1):
        own, export = trainer(mtp)
        planned.update(own, rows)
        saved.append(save_checkpoint(own, tmp_path / str(mtp), 1, {}))
        if mtp:
            save_hf(export, world, tmp_path / "exported", hf_dir)
        metrics, weights = went_on(own, export)
    resumed, export = trainer(1)
    with pytest.raises(CheckpointError, match="holds no multi-token prediction layer"):
        load_checkpoint(resumed, saved[0])
    load_checkpoint(resumed, saved[1])
    again, found = went_on(resumed, export)
    assert_same_bytes(found, weights)
    assert again == metrics

    exported, origin = tensors_of(tmp_path / "exported"), tensors_of(hf_dir)
    assert exported.keys() == origin.keys()
    assert all(not torch.equal(exported[n], t) for n, t in origin.items() if n.startswith("mtp."))
    megatron_to_hf(saved[1], tmp_path / "converted", world)
    assert_same_bytes(tensors_of(tmp_path / "converted"), exported)


def test_engines_get_the_layer_where_they_draft_with_it():
    def drafts(*arguments):
        return drafts_with_mtp(arguments)

    config = '{"method": "%s", "num_speculative_tokens": 1}'
    assert drafts("speculative-config=" + config % "mtp")
    assert drafts("speculative_config=" + config % "qwen3_next_mtp")
    assert not drafts("speculative_config=" + config % "ngram", "max_logprobs=3")
    assert not drafts()


@pytest.mark.world(1)
def test_models_and_layouts_without_mtp_support_are_refused_by_name(world, tmp_path):
    bare = make_qwen3_next(tmp_path / "bare", 4)
    with pytest.raises(CheckpointError, match="holds 0 multi-token prediction layers"):
        open_trainer(world, bare, mtp_config(layout()))
    close_trainer()
    shape, dense = read_hf_config(bare), read_hf_config(make_qwen3(tmp_path / "dense", 3))
    for own, parallel, ranks, words in (
        (dense, layout(), 1, "qwen3 has no multi-token prediction layer"),
        (shape, layout(pp=2), 2, "--pipeline-model-parallel-size=2"),
        (shape, layout(cp=2), 2, "--context-parallel-size=2"),
    ):
        (problem,) = check_layout(own, parallel, ranks, mtp_layers=1)
        assert words in problem
