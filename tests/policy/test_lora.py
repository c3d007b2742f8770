"""Low-rank adapters: gradients, layouts, checkpoints, and what PEFT makes of them."""

from dataclasses import replace
from itertools import chain
from pathlib import Path
from unittest import mock

import pytest
import torch

from megatron_ibpo.config import ConfigError
from megatron_ibpo.models import read_hf_config
from megatron_ibpo.models.lora import check_lora, chosen_lora, pairs
from megatron_ibpo.models.weight_map import weight_map
from megatron_ibpo.run.checks import check_run
from megatron_ibpo.run.settings import parse_config
from megatron_ibpo.weights.formats.run_state import read_layout
from megatron_ibpo.weights.formats.same_adapters import check_same_adapters
from megatron_ibpo.weights.weight_errors import CheckpointError
from support import planned
from support.layouts import layout
from support.paths import ROOT
from support.ranks import run_ranks
from support.tiny_models import make_glm4_moe, make_gpt_oss, make_qwen3, make_qwen3_5, make_qwen3_next
from support.train_sequences import sequences
from support.trainers import close_trainer, config_for, weights_of

RANK, ALPHA = 3, 5.0


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models")
    return {
        "dense": make_qwen3(directory / "dense", 3, std=0.1),
        "next": make_qwen3_next(directory / "next", 4, std=0.1),
        "3.5": make_qwen3_5(directory / "3.5", 5, moe=True, std=0.1),
        "glm": make_glm4_moe(directory / "glm", 6, std=0.1),
        "oss": make_gpt_oss(directory / "oss", 7, std=0.1),
    }


def adapted_config(parallel=None, targets=("all",), hf_dir=None, **settings):
    config = config_for(parallel or layout(), **settings)
    config.model.hf_checkpoint = None if hf_dir is None else Path(hf_dir)
    config.model.lora_rank, config.model.lora_alpha, config.model.lora_targets = RANK, ALPHA, targets
    return config


def built(hf_dir, config):
    from megatron_ibpo.policy.model import build_model
    from megatron_ibpo.weights.formats.load import load_hf

    shape = read_hf_config(Path(hf_dir))
    chunks = build_model(shape, config, device="cpu")
    load_hf(chunks, shape, Path(hf_dir))
    return chunks, shape


def stir(chunks):
    """Give every B something else than 0."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                if ".lora.B" in name:
                    parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))


def logits(chunk, ids_1N):
    """[1, N, V] of two packed sequences."""
    from megatron.core.packed_seq_params import PackedSeqParams

    length = ids_1N.shape[1]
    bounds = torch.tensor([0, length // 3, length], dtype=torch.int32)
    positions = torch.cat([torch.arange(length // 3), torch.arange(length - length // 3)])
    packed = PackedSeqParams("thd", bounds, bounds, max_seqlen_q=length, max_seqlen_kv=length)
    return chunk(ids_1N, positions[None], None, packed_seq_params=packed)


TOKENS = torch.randint(2, 64, (1, 30), generator=torch.Generator().manual_seed(0))


def gradients_of_both_forms(world, hf_dir):
    """Return for each factor (its gradient, what the chain rule makes of the gradient of the merged
    matrix)."""
    from megatron_ibpo.policy import parallel
    from megatron_ibpo.policy.adapters import adapter_values, merged_values

    parallel.initialize(layout(), world, seed=0)
    (adapted,), shape = built(hf_dir, adapted_config())
    (merged,), _ = built(hf_dir, config_for(layout()))
    stir([adapted])
    adapted.double(), merged.double()
    generator = torch.Generator().manual_seed(2)
    parameters = dict(merged.named_parameters())
    with torch.no_grad():
        for name, read in merged_values([adapted]).items():
            parameters[name].copy_(read())
    # norms and delta nets, which compute in float32, would add its rounding to both sides
    with mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
        outputs = [logits(model, TOKENS) for model in (adapted, merged)]
        wanted = torch.randn(outputs[0].shape, dtype=torch.float64, generator=generator)
        for output in outputs:
            (output * wanted).sum().backward()
    lora = chosen_lora(adapted_config().model, shape)
    factors = {name: read().clone() for name, read in adapter_values([adapted]).items()}
    for name, parameter in adapted.named_parameters():
        assert (parameter.grad is not None) == (".lora." in name), name
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    found = {name: read().clone() for name, read in adapter_values([adapted]).items()}
    pairs_of = {}
    for entry in weight_map(shape).values():
        for pair in pairs(entry, lora):
            grad = parameters[entry.name].grad
            own = grad if entry.expert is not None else entry.take_apart(grad, 0, 1)[pair.number]
            a, b = factors[pair.a.name], factors[pair.b.name]
            pairs_of[pair.a.name] = found[pair.a.name], lora.scale * b.T @ own
            pairs_of[pair.b.name] = found[pair.b.name], lora.scale * own @ a.T
    close_trainer()
    return pairs_of, (outputs[0] - outputs[1]).abs().max().item()


@pytest.mark.world
@pytest.mark.parametrize(
    "model",
    ["dense", "next", *(pytest.param(name, marks=pytest.mark.slow) for name in ("3.5", "glm", "oss"))],
)
def test_gradients_are_those_of_the_merged_matrix_by_the_chain_rule(checkpoints, model):
    """W' = W + s·BA gives dA = s·Bᵀ dW' and dB = s·dW' Aᵀ, beside every matrix of the layers."""
    ((found, apart),) = run_ranks(gradients_of_both_forms, 1, checkpoints[model], timeout=400)
    assert apart < 1e-10
    # the correction of GLM's router, which is not trained, leaves one expert of a layer without a token
    idle = {name for name, (_, expected) in found.items() if not expected.any()}
    assert len(idle) <= 4
    assert all(".experts." in name and not found[name][0].any() for name in idle), idle
    worst = max(
        ((own - expected).abs().max() / expected.abs().max()).item()
        for name, (own, expected) in found.items()
        if name not in idle
    )
    print(len(found), "factors; worst relative difference", worst, "logits", apart)
    assert worst < 1e-10


def saved_and_computed(world, hf_dir, directory, targets):
    """Logits of the model with adapters, after they were saved for PEFT."""
    from megatron_ibpo.policy import parallel
    from megatron_ibpo.policy.adapters import offered_adapters
    from megatron_ibpo.weights.formats.peft import save_peft

    parallel.initialize(layout(), world, seed=0)
    config = adapted_config(targets=targets, hf_dir=hf_dir)
    chunks, shape = built(hf_dir, config)
    stir(chunks)
    save_peft(offered_adapters(chunks, shape, config.model), Path(directory))
    with torch.no_grad():
        found = logits(chunks[0], TOKENS)
    close_trainer()
    return found


SOME = ("q_proj", "v_proj", "down_proj", "experts")


@pytest.mark.world
@pytest.mark.parametrize(
    ("model", "targets", "tolerance"),
    [
        ("dense", ("all",), 1e-5),
        ("next", ("all",), 5e-5),
        pytest.param("dense", ("q_proj", "v_proj"), 1e-5, marks=pytest.mark.slow),
        pytest.param("next", SOME, 5e-5, marks=pytest.mark.slow),
        pytest.param("3.5", ("all",), 5e-5, marks=pytest.mark.slow),
        pytest.param("glm", ("all",), 5e-5, marks=pytest.mark.slow),
        pytest.param("oss", ("all",), 5e-5, marks=pytest.mark.slow),
    ],
)
def test_peft_computes_the_same_with_what_is_saved(checkpoints, tmp_path, model, targets, tolerance):
    import transformers
    from peft import PeftModel

    (found,) = run_ranks(
        saved_and_computed, 1, checkpoints[model], tmp_path / "adapter", targets, timeout=400
    )
    base = transformers.AutoModelForCausalLM.from_pretrained(checkpoints[model], dtype=torch.float32)
    with torch.no_grad():
        plain = [base(part).logits for part in TOKENS.split([10, 20], dim=1)]
        loaded = PeftModel.from_pretrained(base, tmp_path / "adapter")
        own = [loaded(part).logits for part in TOKENS.split([10, 20], dim=1)]
    own, plain = torch.cat(own, dim=1), torch.cat(plain, dim=1)
    difference, moved = (own - found).abs().max().item(), (own - plain).abs().max().item()
    print(model, targets, "difference", difference, "adapters move logits by", moved)
    assert moved > 0.1
    assert difference < tolerance


def trained(world, cases, rows):
    """Return, for each (checkpoint, layout, settings): adapters and merged weights from rank 0, and metrics,
    after two updates; B is 0 before the first, so that A moves in the second."""
    from megatron_ibpo.policy import parallel

    found = []
    for hf_dir, chosen, settings in cases:
        config = training_config(hf_dir, chosen, **settings)
        trainer, exports, _ = open_adapted(world, config)
        metrics = [planned.update(trainer, rows) for _ in range(2)]
        own = weights_of(chain(*exports))
        assert not any(hasattr(p, "main_grad") for p in trainer.chunks[0].parameters() if not p.requires_grad)
        found.append((own, metrics))
        parallel.destroy()
    return found


def training_config(hf_dir, chosen, *, recompute="none", **settings):
    # with the large epsilon B moves by LR / epsilon times its gradient, far enough to give A one
    config = adapted_config(chosen, hf_dir=hf_dir, lr=30.0, **settings)
    config.model.recompute_granularity = recompute
    return config


def open_adapted(world, config):
    """(trainer, exports of its adapters and of merged weights, what is saved for PEFT)."""
    from megatron_ibpo.policy import parallel
    from megatron_ibpo.policy.adapters import merged_values, offered_adapters
    from megatron_ibpo.policy.reference import load_reference
    from megatron_ibpo.policy.trainer import Trainer
    from megatron_ibpo.weights.layout.export import HFExport

    parallel.initialize(config.parallel, world, seed=0)
    chunks, shape = built(config.model.hf_checkpoint, config)
    adapters = offered_adapters(chunks, shape, config.model)
    merged = HFExport(chunks, shape, values=merged_values(chunks))
    reference = load_reference(chunks, shape, None) if config.loss.kl_coef else None
    trainer = Trainer(chunks, shape.vocab_size, config, world, 10, reference)
    return trainer, (adapters.export, merged), adapters


def experts_divided():
    """ETP2. (Megatron's dispatcher gathers unequal parts at EP2 beside it, which gloo does not.)"""
    return replace(layout(tp=2), expert_tensor_parallel_size=2)


LAYOUTS = {
    1: [
        ("dense", layout(), {}),
        ("dense", layout(), {"recompute": "full", "max_tokens": 60}),
        ("dense", layout(), {"fuse_lm_head": True}),
        ("next", layout(), {}),
    ],
    2: [("next", layout(tp=2, ep=2), {}), ("next", experts_divided(), {})],
}
MORE_LAYOUTS = {
    1: [("dense", layout(), {}), ("next", layout(), {}), ("3.5", layout(), {})],
    2: [
        ("dense", layout(tp=2), {}),
        ("dense", layout(pp=2), {}),
        ("dense", layout(distributed_optimizer=True), {}),
        ("next", layout(pp=2), {"recompute": "full"}),
        ("next", layout(ep=2, distributed_optimizer=True), {}),
        ("3.5", layout(tp=2, ep=2), {}),
    ],
    4: [
        ("dense", layout(tp=2, pp=2), {}),
        ("next", layout(tp=2, ep=4), {}),
        ("next", experts_divided(), {}),
        ("3.5", layout(tp=2), {}),
    ],
}


@pytest.mark.world
@pytest.mark.parametrize(
    "layouts",
    [pytest.param(LAYOUTS, id="each kind"), pytest.param(MORE_LAYOUTS, id="more", marks=pytest.mark.slow)],
)
def test_adapters_and_merged_weights_are_the_same_under_every_layout(checkpoints, layouts):
    found, rows = {}, sequences(6)
    for size, cases in layouts.items():
        named = [(checkpoints[model], chosen, settings) for model, chosen, settings in cases]
        per_rank = run_ranks(trained, size, named, rows, timeout=400)
        for (model, chosen, settings), (own, metrics) in zip(cases, per_rank[0], strict=True):
            found[model, size, repr(chosen), repr(settings)] = own, metrics
    for (model, size, chosen, settings), (own, metrics) in found.items():
        expected, expected_metrics = found[model, 1, repr(layout()), "{}"]
        assert own.keys() == expected.keys()
        worst = max((own[name] - expected[name]).abs().max().item() for name in expected)
        scale = max(value.abs().max().item() for name, value in expected.items() if ".lora_B" in name)
        print(model, size, settings, "worst", worst, "of", scale)
        assert worst <= 2e-4 * scale, (model, chosen)
        for step, step_expected in zip(metrics, expected_metrics, strict=True):
            assert step["grad_norm"] == pytest.approx(step_expected["grad_norm"], rel=2e-4)
            assert step["loss"] == pytest.approx(step_expected["loss"], rel=2e-4, abs=1e-6)


def saved_and_resumed(world, cases, rows, directory):
    """Return, for each (checkpoint, layout that saves, layout that goes on, targets): adapters after a step
    more, of the run that was saved and of the one that goes on, and what a checkpoint has beside Megatron's
    files."""
    from megatron_ibpo.policy import parallel
    from megatron_ibpo.policy.checkpoint import load_checkpoint
    from megatron_ibpo.policy.saving import Keep, SaveOrder, Saver
    from megatron_ibpo.weights.formats.torch_dist import StoredCheckpoint

    found = []
    for number, (hf_dir, saves, goes_on, targets) in enumerate(cases):
        place = Path(directory) / str(number)
        trainer, offered, adapters = open_adapted(world, training_config(hf_dir, saves, targets=targets))
        planned.update(trainer, rows)
        saver = Saver(world, adapters)
        saver.begin(trainer, SaveOrder(place, 1, {}, Keep(1)))
        planned.update(trainer, rows)
        saver.rests(wait=True)
        saver.seal()
        saver.rests(wait=True)
        world.on_all_ranks(saver.end)
        expected = weights_of(chain(*offered))
        parallel.destroy()
        trainer, offered, _ = open_adapted(world, training_config(hf_dir, goes_on, targets=targets))
        load_checkpoint(trainer, place / "step_000001")
        planned.update(trainer, rows)
        own = weights_of(chain(*offered))
        parallel.destroy()
        found.append((own, expected, list(StoredCheckpoint(place / "step_000001").tensors)))
    return found


def differences(found):
    """Return each case's difference, relative to the largest B."""
    for own, expected, stored in found:
        assert stored, "a checkpoint holds adapters"
        assert all(".lora." in name for name in stored)
        assert own.keys() == expected.keys()
        scale = max(value.abs().max().item() for name, value in expected.items() if ".lora_B" in name)
        yield max((own[name] - expected[name]).abs().max().item() for name in expected) / scale


@pytest.mark.world
def test_a_run_goes_on_from_its_adapters_under_its_layout_bit_for_bit(checkpoints, tmp_path):
    cases = [
        (checkpoints["dense"], layout(), layout(), ("q_proj", "down_proj")),
        (checkpoints["next"], layout(), layout(), ("experts",)),
        (checkpoints["glm"], layout(), layout(), ("all",)),
    ]
    (found,) = run_ranks(saved_and_resumed, 1, cases, sequences(), tmp_path, timeout=400)
    assert [*differences(found)] == [0, 0, 0]
    for number in range(len(cases)):
        saved = tmp_path / str(number) / "step_000001"
        assert {path.name for path in (saved / "adapter").iterdir()} == {
            "adapter_model.safetensors",
            "adapter_config.json",
        }

    # other adapters, beside another model, or none
    saved = tmp_path / "0/step_000001"
    described = read_layout(saved)["lora"]
    own = training_config(checkpoints["dense"], layout(), targets=("q_proj", "down_proj")).model
    check_same_adapters(described, own, saved)
    for changed, message in (
        ({"lora_rank": 4}, "--lora-rank 3, this run 4"),
        ({"lora_alpha": 1.0}, "--lora-alpha 5.0, this run 1.0"),
        ({"lora_targets": ("q_proj",)}, "--lora-targets down_proj q_proj, this run q_proj"),
        ({"lora_rank": None}, "holds adapters only"),
        ({"hf_checkpoint": Path("examples/tiny_qwen3")}, "belong to the weights that were in"),
    ):
        with pytest.raises(CheckpointError, match=message):
            check_same_adapters(described, replace(own, **changed), saved)
    with pytest.raises(CheckpointError, match="holds weights and no adapters"):
        check_same_adapters(None, own, saved)


@pytest.mark.world
@pytest.mark.slow
def test_a_run_goes_on_from_its_adapters_under_another_layout(checkpoints, tmp_path):
    sharded = layout(distributed_optimizer=True)
    cases = [
        (checkpoints["next"], layout(tp=2, ep=2), experts_divided(), ("all",)),
        (checkpoints["dense"], layout(tp=2), layout(pp=2), ("all",)),
        (checkpoints["3.5"], layout(tp=2, ep=2), layout(), ("all",)),
        (checkpoints["next"], replace(sharded, expert_model_parallel_size=2), sharded, ("all",)),
        (checkpoints["next"], sharded, sharded, ("experts",)),
    ]
    found = run_ranks(saved_and_resumed, 2, cases, sequences(), tmp_path, timeout=400)[0]
    worst = [*differences(found)]
    print("differences", worst)
    assert max(worst) <= 2e-4


def held_to_the_base(world, hf_dir, rows):
    """Log-probs before training, of the reference after it, and of the policy after it."""
    from megatron_ibpo.policy import parallel

    trainer, _, _ = open_adapted(world, training_config(hf_dir, layout(), kl_coef=0.5))
    before = planned.logprobs(trainer, rows)
    metrics = [planned.update(trainer, rows) for _ in range(2)]
    with trainer.reference.swapped_in(trainer.chunks):
        reference = planned.logprobs(trainer, rows)
    after = planned.logprobs(trainer, rows)
    parallel.destroy()
    return before, reference, after, [own["kl"] for own in metrics]


@pytest.mark.world
def test_without_another_reference_it_is_the_model_without_its_adapters(checkpoints):
    ((before, reference, after, kl),) = run_ranks(
        held_to_the_base, 1, checkpoints["dense"], sequences(), timeout=400
    )
    assert reference == before
    assert after != before
    assert kl[0] == 0
    assert kl[1] > 0


TINY = ROOT / "examples/tiny_qwen3_next"


@pytest.mark.parametrize(
    ("targets", "parallel", "message"),
    [
        (("q_porj",), layout(), "no 'q_porj'; did you mean 'q_proj'"),
        (("in_proj_z",), layout(), "it has down_proj, experts, gate_proj, in_proj_ba, in_proj_qkvz, k_proj"),
        (("all",), layout(tp=4), "--tensor-model-parallel-size=4 exceeds the 2 key/value heads"),
        (("q_proj",), layout(pp=2), "no layer of pipeline stage 0 has one of them"),
    ],
)
def test_adapters_that_a_model_or_layout_cannot_have_are_refused(targets, parallel, message):
    model = adapted_config(targets=targets).model
    (problem,) = check_lora(model, read_hf_config(TINY), parallel)
    assert message in problem


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--lora-rank", "0"], "--lora-rank: must be between 1"),
        (["--lora-alpha", "8"], "--lora-alpha: has no effect without --lora-rank"),
        (["--lora-targets", "q_proj"], "--lora-targets: has no effect without --lora-rank"),
        (["--lora-rank", "8", "--advantages", "critic", "--loss-variant", "grpo"], "--lora-rank: a critic"),
        (["--lora-rank", "8", "--moe-aux-loss-coeff", "0.1"], "--moe-aux-loss-coeff: balances routers"),
        (["--lora-rank", "8", "--mtp-num-layers", "1"], "--mtp-num-layers: trains all weights of its layers"),
        (
            ["--lora-rank", "8", "--model-override", "moe_shared_expert_overlap=true"],
            "--model-override moe_shared_expert_overlap: bypasses",
        ),
    ],
)
def test_settings_that_adapters_cannot_be_had_with_are_refused(flags, message):
    config = parse_config(["--hf-checkpoint", str(TINY), "--dry-run", *flags])
    with pytest.raises(ConfigError) as refused:
        check_run(config)
    assert message in str(refused.value)


def memory_of(model, *flags):
    """Return what the dry run says of four GPUs: (census, memory of a rank), and the census by names."""
    from megatron_ibpo.plan.feasibility import make_plan
    from megatron_ibpo.plan.node_memory import census_by_names
    from megatron_ibpo.weights.layout.export import metadata_of

    config = parse_config(["--hf-checkpoint", str(model), "--dry-run", *flags])
    plan = make_plan(config, 4)
    assert plan.problems == []
    elements = {meta.name: meta.num_bytes // 2 for meta in metadata_of(plan.shape, torch.bfloat16)}
    return plan.census, plan.stages[0], census_by_names(plan.shape, plan.config, elements, 4)


def test_the_dry_run_counts_gradients_and_optimizer_state_of_adapters_alone():
    """Qwen3-0.6B with rank 16 beside queries (1024 to 2048) and down projections (3072 to 1024), TP2: A of
    the former and B of the latter are whole on both ranks."""
    model = ROOT / "examples/models/qwen3_0_6b"
    flags = ["--tensor-model-parallel-size", "2"]
    plain, weights, _ = memory_of(model, *flags)
    census, adapters, by_names = memory_of(
        model, *flags, "--lora-rank", "16", "--lora-targets", "q_proj", "down_proj"
    )
    assert census.trained == 28 * 16 * (1024 + 2048 + 3072 + 1024)
    own = 28 * 16 * (1024 + 2048 // 2 + 3072 // 2 + 1024)
    assert census.total == plain.total == plain.trained
    assert adapters.weights == weights.weights + 2 * own
    assert (adapters.gradients, adapters.optimizer) == (4 * own, 12 * own)
    assert (by_names.trained, by_names.stages[0].trained) == (census.trained, own)
