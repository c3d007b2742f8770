"""Low-rank adapters: gradients, layouts, checkpoints, and what PEFT makes of them."""

from dataclasses import replace
from functools import partial
from itertools import chain
from unittest import mock

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_ibpo.config import ConfigError
from megatron_ibpo.models import read_hf_config
from megatron_ibpo.models.lora import check_lora, chosen_lora, pairs
from megatron_ibpo.models.weight_map import weight_map
from megatron_ibpo.plan.feasibility import make_plan
from megatron_ibpo.policy import parallel
from megatron_ibpo.policy import rank as policy_rank
from megatron_ibpo.policy.adapters import adapter_values, merged_values, offered_adapters
from megatron_ibpo.policy.model import build_model
from megatron_ibpo.run.settings import check_run, parse_config
from megatron_ibpo.weights import CheckpointError
from megatron_ibpo.weights.formats.hf_models import check_same_adapters, load_hf, save_peft
from megatron_ibpo.weights.formats.run_state import Keep, read_layout
from megatron_ibpo.weights.formats.torch_dist import StoredCheckpoint
from support import planned
from support.layouts import layout
from support.paths import ROOT
from support.ranks import run_ranks
from support.tiny_models import make_glm4_moe, make_gpt_oss, make_qwen3_5
from support.train_sequences import sequences
from support.trainers import close_trainer, config_for, weights_of

MORE = {"3.5": partial(make_qwen3_5, moe=True), "glm": make_glm4_moe, "oss": make_gpt_oss}
TOKENS = torch.randint(2, 64, (1, 30), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def models(checkpoints, tmp_path_factory):
    place = tmp_path_factory.mktemp("models")
    return checkpoints | {name: make(place / name, 5, std=0.1) for name, make in MORE.items()}


def adapted_config(parallel=None, targets=("all",), hf_dir=None, recompute="none", **settings):
    # with the large epsilon B moves by LR / epsilon times its gradient, far enough to give A one
    config = config_for(parallel or layout(), lr=30.0, **settings)
    config.model.hf_checkpoint, config.model.recompute_granularity = hf_dir, recompute
    config.model.lora_rank, config.model.lora_alpha, config.model.lora_targets = 3, 5.0, targets
    return config


def built(hf_dir, config):
    shape = read_hf_config(hf_dir)
    chunks = build_model(shape, config, device="cpu")
    load_hf(chunks, shape, hf_dir)
    return chunks, shape


@torch.no_grad()
def stir(chunk):
    generator = torch.Generator().manual_seed(1)
    for name, parameter in chunk.named_parameters():
        if ".lora.B" in name:
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))


def logits(chunk):
    """Of two packed sequences."""
    bounds = torch.tensor([0, 10, 30], dtype=torch.int32)
    positions = torch.cat([torch.arange(10), torch.arange(20)])
    packed = PackedSeqParams("thd", bounds, bounds, max_seqlen_q=30, max_seqlen_kv=30)
    return chunk(TOKENS, positions[None], None, packed_seq_params=packed)


@pytest.mark.world(1)
@pytest.mark.parametrize("model", ["dense", "next", "3.5"])
def test_adapter_gradients_follow_the_chain_rule_of_the_merged_matrix(world, models, model):
    """W' = W + s·BA gives dA = s·Bᵀ dW' and dB = s·dW' Aᵀ, beside every matrix of the layers."""
    parallel.initialize(layout(), world, seed=0)
    (adapted,), shape = built(models[model], adapted_config())
    (merged,), _ = built(models[model], config_for(layout()))
    stir(adapted)
    adapted.double(), merged.double()
    parameters = dict(merged.named_parameters())
    with torch.no_grad():
        for name, read in merged_values([adapted]).items():
            parameters[name].copy_(read())
    # norms and delta nets, which compute in float32, would add its rounding to both sides
    with mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
        outputs = [logits(chunk) for chunk in (adapted, merged)]
        generator = torch.Generator().manual_seed(2)
        wanted = torch.randn(outputs[0].shape, dtype=torch.float64, generator=generator)
        for output in outputs:
            (output * wanted).sum().backward()
    assert (outputs[0] - outputs[1]).abs().max() < 1e-10
    lora = chosen_lora(adapted_config().model, shape)
    factors = {name: read().clone() for name, read in adapter_values([adapted]).items()}
    for name, parameter in adapted.named_parameters():
        assert (parameter.grad is not None) == (".lora." in name), name
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    found = {name: read() for name, read in adapter_values([adapted]).items()}
    for entry in weight_map(shape).values():
        for pair in pairs(entry, lora):
            grad = parameters[entry.name].grad
            own = grad if entry.expert is not None else entry.take_apart(grad, 0, 1)[pair.number]
            a, b = factors.pop(pair.a.name), factors.pop(pair.b.name)
            both = {pair.a.name: lora.scale * b.T @ own, pair.b.name: lora.scale * own @ a.T}
            for name, expected in both.items():
                largest = expected.abs().max()
                assert largest > 0, name
                assert (found[name] - expected).abs().max() <= 1e-10 * largest, name
    assert not factors, "each was compared"


@pytest.mark.world(1)
@pytest.mark.parametrize("names", [["dense", "next"], pytest.param(["some", *MORE], marks=pytest.mark.slow)])
def test_peft_computes_the_same_from_saved_adapters(world, models, tmp_path, names):
    import transformers
    from peft import PeftModel

    for name in names:
        targets = ("q_proj", "v_proj", "down_proj", "experts") if name == "some" else ("all",)
        hf_dir, place = models["next" if name == "some" else name], tmp_path / name
        parallel.initialize(layout(), world, seed=0)
        config = adapted_config(targets=targets, hf_dir=hf_dir)
        (chunk,), shape = built(hf_dir, config)
        stir(chunk)
        save_peft(offered_adapters([chunk], shape, config.model), place)
        base = transformers.AutoModelForCausalLM.from_pretrained(hf_dir, dtype=torch.float32)
        with torch.no_grad():
            found = logits(chunk)
            plain = torch.cat([base(part).logits for part in TOKENS.split([10, 20], dim=1)], dim=1)
            loaded = PeftModel.from_pretrained(base, place)
            own = torch.cat([loaded(part).logits for part in TOKENS.split([10, 20], dim=1)], dim=1)
        close_trainer()
        assert (own - plain).abs().max() > 0.1, "adapters move logits"
        assert (own - found).abs().max() < (1e-5 if name == "dense" else 5e-5), name


def opened(world, config, checkpoint=None):
    with mock.patch.object(policy_rank, "start_world", return_value=world):
        return policy_rank.TrainerRank(config, checkpoint)


def adapters_and_merged(rank):
    return weights_of(chain(rank.saver.adapters.export, rank.export))


def gap(own, expected):
    """How far both lie apart, relative to the largest B."""
    assert own.keys() == expected.keys()
    largest = max(value.abs().max().item() for name, value in expected.items() if ".lora_B" in name)
    return max((own[name] - expected[name]).abs().max().item() for name in expected) / largest


def trained(world, cases, rows):
    """Exports, and metrics, of two updates for each case. B is 0 before the first: A moves in the second."""
    found = []
    for hf_dir, chosen, settings in cases:
        rank = opened(world, adapted_config(chosen, hf_dir=hf_dir, **settings))
        metrics = [planned.update(rank.trainer, rows) for _ in range(2)]
        parameters = rank.trainer.chunks[0].parameters()
        assert not any(hasattr(p, "main_grad") for p in parameters if not p.requires_grad), (
            hf_dir,
            chosen,
            settings,
        )
        found.append((adapters_and_merged(rank), metrics))
        close_trainer()
    return found


EXPERTS_DIVIDED = layout(tp=2, etp=2)  # at EP2 beside it Megatron gathers unequal parts, which gloo does not
SHARDED = layout(distributed_optimizer=True)
FULL, FUSED = {"recompute": "full", "max_tokens": 60}, {"fuse_lm_head": True}
LAYOUTS = {
    1: [("next", layout(), {}), *(("dense", layout(), how) for how in ({}, FULL, FUSED))],
    2: [("next", layout(tp=2, ep=2), {}), ("next", EXPERTS_DIVIDED, {})],
}
MORE_LAYOUTS = {
    1: [(name, layout(), {}) for name in ("dense", "next", "3.5")],
    2: [("next", layout(pp=2), FULL), ("dense", SHARDED, {})],
    4: [("next", own, {}) for own in (layout(tp=2, ep=4), EXPERTS_DIVIDED)]
    + [("dense", layout(tp=2, pp=2), {}), ("3.5", layout(tp=2), {})],
}


@pytest.mark.world
@pytest.mark.parametrize("layouts", [LAYOUTS, pytest.param(MORE_LAYOUTS, marks=pytest.mark.slow)])
def test_adapters_and_merged_weights_are_the_same_under_every_layout(models, layouts):
    """More layouts are those between which runs go on below."""
    found: dict = {}
    for size, cases in layouts.items():
        named = [(models[model], *case) for model, *case in cases]
        own_rank = run_ranks(trained, size, named, sequences(6), timeout=400)[0]
        for (model, chosen, settings), (own, metrics) in zip(cases, own_rank, strict=True):
            expected, wanted = found.setdefault(model, (own, metrics))  # of one process
            assert gap(own, expected) <= 2e-4, (model, chosen, settings)
            for step, other in zip(metrics, wanted, strict=True):
                for name in ("grad_norm", "loss"):
                    assert step[name] == pytest.approx(other[name], rel=2e-4, abs=1e-6), chosen


def saved_and_resumed(world, cases, rows, directory):
    """The gap between a trainer that went on after its save and one that resumed, for each case."""
    found = []
    for number, (hf_dir, saves, goes_on, targets) in enumerate(cases):
        saved = directory / f"{number}/step_000001"
        rank = opened(world, adapted_config(saves, targets, hf_dir))
        planned.update(rank.trainer, rows)
        rank.save(saved.parent, 1, {}, Keep(1))
        planned.update(rank.trainer, rows)
        rank.save_rests(True)
        rank.seal_save()
        rank.save_rests(True)
        world.on_all_ranks(rank.end_save)
        expected = adapters_and_merged(rank)
        close_trainer()
        assert {".lora." in name for name in StoredCheckpoint(saved).tensors} == {True}, "adapters alone"
        assert (saved / "adapter/adapter_model.safetensors").exists(), "for PEFT"
        rank = opened(world, adapted_config(goes_on, targets, hf_dir), saved)
        planned.update(rank.trainer, rows)
        own = adapters_and_merged(rank)
        close_trainer()
        found.append(gap(own, expected) if world.is_rank_0 else None)
    return found


@pytest.mark.world
def test_a_resumed_adapter_run_continues_bit_for_bit(models, tmp_path):
    targets = {"dense": ("q_proj", "down_proj"), "next": ("experts",), "glm": ("all",)}
    cases = [(models[name], layout(), layout(), own) for name, own in targets.items()]
    assert run_ranks(saved_and_resumed, 1, cases, sequences(), tmp_path, timeout=400) == [[0, 0, 0]]

    # other adapters, beside another model, or none
    saved = tmp_path / "0/step_000001"
    described = read_layout(saved)["lora"]
    own = adapted_config(targets=targets["dense"], hf_dir=models["dense"]).model
    check_same_adapters(described, own, saved)
    for message, changed in {
        "--lora-alpha 5.0, this run 1.0": replace(own, lora_alpha=1.0),
        "--lora-targets down_proj q_proj, this run q_proj": replace(own, lora_targets=("q_proj",)),
        "holds adapters only": replace(own, lora_rank=None),
        "belong to the weights that were in": replace(own, hf_checkpoint=ROOT / "examples/tiny_qwen3"),
    }.items():
        with pytest.raises(CheckpointError, match=message):
            check_same_adapters(described, changed, saved)
    with pytest.raises(CheckpointError, match="holds weights and no adapters"):
        check_same_adapters(None, own, saved)


@pytest.mark.world
@pytest.mark.slow
def test_a_run_goes_on_from_its_adapters_under_another_layout(models, tmp_path):
    cases = [
        (models["next"], layout(tp=2, ep=2), EXPERTS_DIVIDED, ("all",)),
        (models["dense"], layout(tp=2), layout(pp=2), ("all",)),
        (models["3.5"], layout(tp=2, ep=2), layout(), ("all",)),
        (models["next"], layout(ep=2, distributed_optimizer=True), SHARDED, ("all",)),
        (models["next"], SHARDED, SHARDED, ("experts",)),
    ]
    assert max(run_ranks(saved_and_resumed, 2, cases, sequences(), tmp_path, timeout=400)[0]) <= 2e-4


@pytest.mark.world(1)
def test_without_another_reference_it_is_the_model_without_its_adapters(world, checkpoints):
    rows = sequences()
    trainer = opened(world, adapted_config(hf_dir=checkpoints["dense"], kl_coef=0.5)).trainer
    before = planned.logprobs(trainer, rows)
    assert planned.update(trainer, rows)["kl"] == 0
    assert planned.update(trainer, rows)["kl"] > 0
    with trainer.reference.swapped_in(trainer.chunks):
        assert planned.logprobs(trainer, rows) == before
    assert planned.logprobs(trainer, rows) != before


def test_adapters_that_model_layout_or_settings_exclude_are_refused():
    tiny = ROOT / "examples/tiny_qwen3_next"
    for target, sizes, message in (
        ("q_porj", {}, "no 'q_porj'; did you mean 'q_proj'"),
        ("all", {"tp": 4}, "--tensor-model-parallel-size=4 exceeds the 2 key/value heads"),
        ("q_proj", {"pp": 2}, "no layer of pipeline stage 0 has one of them"),
    ):
        model = adapted_config(targets=(target,)).model
        (problem,) = check_lora(model, read_hf_config(tiny), layout(**sizes))
        assert message in problem
    for flags, message in {
        "--lora-rank 8 --advantages critic --loss-variant grpo": "--lora-rank: a critic",
        "--lora-rank 8 --moe-aux-loss-coeff 0.1": "--moe-aux-loss-coeff: balances routers",
        "--lora-rank 8 --mtp-num-layers 1": "--mtp-num-layers: trains all weights of its layers",
        "--lora-rank 8 --model-override moe_shared_expert_overlap=true": "expert_overlap: bypasses",
    }.items():
        with pytest.raises(ConfigError, match=message):
            check_run(parse_config(["--hf-checkpoint", str(tiny), "--dry-run", *flags.split()]))


def test_the_dry_run_counts_training_state_of_adapters_only():
    """Qwen3-0.6B with rank 16 beside queries (1024 to 2048) and down projections (3072 to 1024), TP2: A of
    the former and B of the latter are whole on both ranks."""
    flags = f"--hf-checkpoint {ROOT}/examples/models/qwen3_0_6b --dry-run --tensor-model-parallel-size 2"
    adapters = " --lora-rank 16 --lora-targets q_proj down_proj"
    plain, adapted = (make_plan(parse_config(own.split()), 4) for own in (flags, flags + adapters))
    assert plain.problems == adapted.problems == []
    own = 28 * 16 * (1024 + 2048 // 2 + 3072 // 2 + 1024)
    assert adapted.census.trained == 28 * 16 * (1024 + 2048 + 3072 + 1024)
    assert adapted.census.total == plain.census.total == plain.census.trained
    whole, stage = plain.stages[0], adapted.stages[0]
    assert (stage.weights, stage.gradients, stage.optimizer) == (whole.weights + 2 * own, 4 * own, 12 * own)
