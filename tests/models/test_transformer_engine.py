"""Transformer Engine needs a GPU. Its classes are stood in for (`te_stand_in`), with what theirs do in a
state dict; Megatron's own wrappers around them, its optimizer and its checkpoints are real."""

import pickle
from collections import Counter
from dataclasses import replace

import pytest
import torch

from megatron_ibpo.basics.distributed import start_world
from megatron_ibpo.models import read_hf_config
from megatron_ibpo.models.backends import Backends
from megatron_ibpo.weights import CheckpointError
from megatron_ibpo.weights.formats.convert import hf_to_megatron
from support import te_stand_in
from support.layouts import layout
from support.model_passes import ALONE
from support.tiny_models import make_gpt_oss, make_olmo2, make_qwen3, make_qwen3_next
from support.trainers import config_for

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def built(new_process, tmp_path_factory):
    """What models are with these layers and with local ones, on the meta device as rank 0 of a TP2 layout."""
    directory = tmp_path_factory.mktemp("models")
    models = {
        "hybrid": (make_qwen3_next(directory / "next", 0), 2),
        "dense": (make_qwen3(directory / "dense", 0), 1),
        "post-norm": (make_olmo2(directory / "olmo2", 0), 1),
        "biased": (make_gpt_oss(directory / "oss", 0), 2),  # sinks, and experts that have biases
    }
    described = new_process(te_stand_in.describe_all, [*models.values()])
    return dict(zip(models, described, strict=True))


def test_both_back_ends_agree(built):
    for model in built.values():
        for what in ("parameters", "marks", "checkpoint"):
            assert model["te"][what] == model["local"][what]
            assert len(model["te"][what]) > 10


def test_transformer_engines_classes_serve_where_the_spec_says(built):
    for name, expected in (
        # of four layers, the last with attention: in and out projections, experts and a shared one in each
        ("hybrid", {"TELayerNormColumnParallelLinear": 4, "TERowParallelLinear": 4 + 4,
                    "TEColumnParallelLinear": 4, "TEDotProductAttention": 1, "TEGroupedMLP": 4,
                    "TEColumnParallelGroupedLinear": 4, "TERowParallelGroupedLinear": 4}),
        ("dense", {"TELayerNormColumnParallelLinear": 4, "TERowParallelLinear": 4,
                   "TEDotProductAttention": 2}),
        ("post-norm", {"TEColumnParallelLinear": 4, "TERowParallelLinear": 4, "TEDotProductAttention": 2}),
    ):  # fmt: skip
        kinds = Counter(built[name]["te"]["classes"].values())
        assert {kind: count for kind, count in kinds.items() if kind.startswith("TE")} == expected
    assert built["hybrid"]["optimizer"] == "FusedAdam"
    for library in ("te", "local"):
        centred = built["hybrid"][library]["centred"]
        not_centred = {name for name in centred if not centred[name]}
        assert not_centred == {f"decoder.layers.{layer}.self_attention.out_norm" for layer in range(3)}, (
            library
        )
    assert not any(built["dense"]["te"]["centred"].values())


@pytest.mark.new_process
@pytest.mark.usefixtures("built")  # whose process has the classes
def test_a_run_with_transformer_engine_goes_on_from_checkpoints(tmp_path):
    from megatron_ibpo.policy import cpu, parallel

    cpu.activate()
    from megatron_ibpo.policy.checkpoint import load_checkpoint
    from megatron_ibpo.policy.model import build_model
    from megatron_ibpo.policy.saving import save_checkpoint
    from megatron_ibpo.policy.trainer import Trainer
    from megatron_ibpo.weights.formats.hf_models import load_hf

    hf_dir, converted = make_qwen3_next(tmp_path / "hf", 0), tmp_path / "converted"
    hf_to_megatron(hf_dir, converted, layout(), ALONE)
    config, shape = config_for(layout(distributed_optimizer=True)), read_hf_config(hf_dir)
    world = start_world()
    parallel.initialize(config.parallel, world, seed=0)

    def trainer():
        chunks = build_model(shape, config, libraries=Backends(True, False))
        load_hf(chunks, shape, hf_dir)
        return Trainer(chunks, shape.vocab_size, config, world, total_updates=10)

    def step(trainer):
        for optimizer in trainer.optimizer.chained_optimizers:
            for group in optimizer.optimizer.param_groups:
                group["lr"] = 1e-3
                for parameter in group["params"]:
                    parameter.grad = torch.ones_like(parameter)
            optimizer.step_with_ready_grads()

    def scaled(trainer):
        modules = trainer.chunks[0].named_modules()
        return {name: module for name, module in modules if isinstance(module, te_stand_in.Module)}

    def loaded(checkpoint):
        notes = load_checkpoint(new, checkpoint)
        assert not any(module.scales for module in scaled(new).values())
        return notes

    trained, resumed, new = trainer(), trainer(), trainer()
    original = weights(new)
    trained.optimizer.prepare_grads()
    for _ in range(2):  # so that the optimizer counts more than one
        step(trained)
    load_checkpoint(resumed, save_checkpoint(trained, tmp_path, 2, {}))
    assert sum("_extra_state" in name for name in trained.chunks[0].module.state_dict()) > 20
    for _ in range(2):  # the state that was saved, and what the next step makes of it
        assert_same(contents(resumed), contents(trained))
        step(trained)
        step(resumed)

    # FP8's scales come back to the bit, for every expert in a grouped module too, where the layout is the
    # same; attention has some that Megatron does not put into its checkpoints
    generator = torch.Generator().manual_seed(0)
    for one in (trained, resumed, new):  # now that they are built: the layers' constructors ask for kernels
        one.chunks[0].config.fp8 = "hybrid"
    for module in scaled(trained).values():
        module.scale(generator)
    saved = save_checkpoint(trained, tmp_path, 3, {})
    assert load_checkpoint(resumed, saved) == ()
    own, got = scaled(trained), scaled(resumed)
    assert len(own) > 20
    assert sum(module.num_gemms for module in own.values() if module.num_gemms > 1) > 10
    scales = [{n: {k: v.tolist() for k, v in m.scales.items()} for n, m in of.items()} for of in (own, got)]
    differ = {name for name in own if scales[0][name] != scales[1][name]}
    assert differ == {"module.decoder.layers.3.self_attention.core_attention"}

    # elsewhere it is said that they form anew
    (note,) = loaded(converted)
    assert "FP8 scales are not restored" in note
    new.config = replace(config, parallel=replace(config.parallel, tensor_model_parallel_size=2))
    (note,) = loaded(saved)
    assert "step_000003 was saved with tensor_model_parallel_size 1; they settle again" in note
    new.config = config
    runs_code = torch.frombuffer(bytearray(pickle.dumps(print)), dtype=torch.uint8)
    next(iter(own.values())).get_extra_state = lambda: runs_code
    unsafe = save_checkpoint(trained, tmp_path, 4, {})
    with pytest.raises(CheckpointError, match=r"is damaged or unsafe, and was not read: .*builtins\.print"):
        load_checkpoint(new, unsafe)
    new.chunks[0].config.fp8 = None
    assert load_checkpoint(new, saved) == ()

    for parameter in new.chunks[0].parameters():
        parameter.data.fill_(torch.nan)
    load_checkpoint(new, converted)  # which has no extra state
    assert_same(weights(new), original)
    chunk = new.chunks[0].module
    named = chunk.sharded_state_dict
    chunk.sharded_state_dict = lambda *given, **more: {
        name: value for name, value in named(*given, **more).items() if "q_layernorm.weight" not in name
    }
    lacking = r"missing decoder\.layers\.3\.self_attention\.q_layernorm\.weight"
    with pytest.raises(CheckpointError, match=lacking):
        load_checkpoint(new, converted)


def weights(trainer):
    return {name: p.detach().clone() for name, p in trainer.chunks[0].named_parameters()}


def contents(trainer):
    """Weights, and the optimizer's means and counts of steps."""
    adams = [part.optimizer for part in trainer.optimizer.chained_optimizers]
    steps = [group["step"] for adam in adams for group in adam.param_groups]
    return [weights(trainer), steps, *(adam.state_dict()["state"] for adam in adams)]


def assert_same(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
