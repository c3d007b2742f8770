"""The Megatron models compute what transformers computes: logits, loss and every gradient, in every layout.

transformers takes each sequence on its own, Megatron all of them packed: equality also shows that packed
sequences do not see each other. Bounds on logits: 1e-5 for attention alone, 5e-5 for Qwen3-Next and Qwen3.5,
whose delta rule transformers itself computes with an error of about 4e-5 in float32.

IBPO_PARITY_DEVICE=cuda (`bash tests/gpu.sh --only parity`) runs the same on GPUs and, in bfloat16 with bounds
for that, what Transformer Engine and flash-linear-attention compute. transformers computes on the CPU, in
plain torch.
"""

import functools
import importlib
import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from megatron_ibpo.config import Config, ModelConfig
from megatron_ibpo.models import read_hf_config
from megatron_ibpo.models.backends import LOCAL
from support import tiny_models
from support.checkpoint_bytes import one_tensor_per_expert
from support.layouts import layout
from support.ranks import run_ranks
from support.tiny_models import LLAMA_3, VOCAB_SIZE

pytestmark = pytest.mark.world

DEVICE = os.environ.get("IBPO_PARITY_DEVICE", "cpu")

LENGTHS = [5, 70, 130, 1, 33, 64, 1]
"""Below, at and across the delta rule's chunks; the last is padding of weight 0."""
ODD_VOCABULARY = 211
"""Of the "odd" models: a prime, which tensor parallelism has to pad."""
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
YARN = {**LINEAR, "rope_type": "yarn", "original_max_position_embeddings": 32, "beta_fast": 16.0}
BOUND, GRADIENT_BOUND = 1e-5, 1e-5
DELTA_NET_BOUND, DELTA_NET_GRADIENT_BOUND = 5e-5, 5e-4
"""Largest difference in a gradient tensor, relative to the largest element of that gradient tensor. Those of
decay parameters are off from float64 by up to 2.8e-4."""
DELTA_NETS = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
"""Families of transformers."""


# fmt: off
CASES = {
    1: {name: [layout()] for name in (
        "dense", "tied", "next", "llama", "llama tied", "llama linear", "llama yarn", "qwen2", "moe",
        "moe as it comes", "glm", "glm plain", "oss", "oss clamped", "3.5", "3.5 moe", "wrapped 3.5",
    )},
    2: {
        "tied": [layout(tp=2)], "odd next": [layout(tp=2)], "llama": [layout(tp=2)],
        "next": [layout(tp=2, ep=2), layout(pp=2, first=1), layout(tp=2, etp=2)],
        "glm": [layout(tp=2, ep=2), layout(pp=2, first=1)],  # a stage without experts
        "oss": [layout(tp=2, ep=2)],
        "3.5": [layout()],  # two data-parallel replicas
    },
    4: {
        "dense": [layout(tp=2, pp=2), layout(tp=4)],  # more ranks than key/value heads
        "next": [layout(tp=2, pp=2, ep=2), layout(tp=2, ep=4)], "few next": [layout(tp=4, ep=4)],
        "wide dense": [layout(tp=4)], "wide next": [layout(tp=4, ep=4)], "wide 3.5": [layout(tp=4)],
        "odd tied": [layout(tp=4)], "odd next": [layout(tp=4, ep=4)], "qwen2": [layout(tp=2, pp=2)],
        "3.5 moe": [layout(tp=2, pp=2, ep=2)], "glm": [layout(tp=2, pp=2, ep=2, first=2)],
        "oss": [layout(tp=2, pp=2, ep=2), layout(tp=4)],
    },
}
"""Layouts of each model, by number of processes."""
MORE_CASES = {
    2: {
        "dense": [layout(tp=2), layout(pp=2)], "tied": [layout(pp=2)], "odd tied": [layout(tp=2)],
        "wide dense": [layout(pp=2, first=2)], "next": [layout(tp=2), layout(ep=2), layout(pp=2)],
        "llama": [layout(pp=2)], "llama tied": [layout(tp=2), layout(pp=2)],
        "qwen2": [layout(tp=2), layout(pp=2)],
        "moe": [layout(tp=2), layout(pp=2), layout(ep=2), layout(tp=2, ep=2)],
        "moe as it comes": [layout(tp=2, ep=2)], "glm plain": [layout(tp=2, ep=2)],
        "glm": [layout(tp=2), layout(ep=2), layout(pp=2, first=2), layout(tp=2, etp=2)],
        "oss": [layout(tp=2), layout(pp=2), layout(ep=2)], "oss clamped": [layout(tp=2, ep=2)],
        "3.5": [layout(tp=2), layout(pp=2)], "wrapped 3.5": [layout(tp=2), layout(pp=2, first=1)],
        "3.5 moe": [layout(pp=2), layout(tp=2, ep=2), layout(tp=2, etp=2), layout(ep=2)],
    },
    4: {
        "dense": [layout(tp=2)],  # and two data-parallel replicas
        "next": [layout(ep=4)], "wide next": [layout(tp=4, etp=4)], "odd tied": [layout(tp=2, pp=2)],
        "llama": [layout(tp=2, pp=2), layout(tp=4)], "llama tied": [layout(tp=2)],
        "moe": [layout(tp=2, pp=2, ep=2)], "glm": [layout(tp=4, ep=4), layout(ep=4)],
        "3.5": [layout(tp=2), layout(tp=2, pp=2), layout(pp=4)],
        "3.5 moe": [layout(tp=2, ep=4), layout(ep=4)],
        "wide 3.5 moe": [layout(tp=4, ep=4), layout(tp=4, etp=4)],
    },
}
# fmt: on
"""What other layouts of the same families leave little doubt of."""

WIDE = {"kv_heads": 4, "key_heads": 4, "value_heads": 8}
MODELS = {
    "dense": (tiny_models.make_qwen3, 5, {}),
    "tied": (tiny_models.make_qwen3, 6, {"tie": True}),
    "next": (tiny_models.make_qwen3_next, 7, {"value_heads": 4}),
    "wide dense": (tiny_models.make_qwen3, 8, {"layers": 3, "kv_heads": 4}),
    "wide next": (tiny_models.make_qwen3_next, 9, WIDE),
    "few next": (tiny_models.make_qwen3_next, 20, {"key_heads": 4, "value_heads": 8}),
    "odd tied": (tiny_models.make_qwen3, 10, {"tie": True, "kv_heads": 4, "vocabulary": ODD_VOCABULARY}),
    "odd next": (tiny_models.make_qwen3_next, 11, {**WIDE, "vocabulary": ODD_VOCABULARY}),
    "llama": (tiny_models.make_llama, 12, {"biased": True, "rope": LLAMA_3}),
    "llama tied": (tiny_models.make_llama, 13, {"tie": True}),
    "llama linear": (tiny_models.make_llama, 14, {"rope": LINEAR}),
    "llama yarn": (tiny_models.make_llama, 15, {"rope": YARN}),
    "qwen2": (tiny_models.make_qwen2, 16, {}),
    "moe": (tiny_models.make_qwen3_moe, 17, {}),
    "moe as it comes": (tiny_models.make_qwen3_moe, 18, {"normalized": False}),
    "glm": (tiny_models.make_glm4_moe, 21, {}),
    "glm plain": (tiny_models.make_glm4_moe, 22, {"dense": 2, "plain": True}),
    "oss": (tiny_models.make_gpt_oss, 23, {}),
    "oss clamped": (tiny_models.make_gpt_oss, 24, {"loud": 7.0}),
    "3.5": (tiny_models.make_qwen3_5, 12, {"value_heads": 4}),
    "3.5 moe": (tiny_models.make_qwen3_5, 13, {"value_heads": 4, "moe": True}),
    "wrapped 3.5": (tiny_models.make_qwen3_5, 14, {"value_heads": 4, "wrapped": True, "tie": True}),
    "wide 3.5": (tiny_models.make_qwen3_5, 15, {**WIDE, "head_dim": 256, "vocabulary": ODD_VOCABULARY}),
    "wide 3.5 moe": (tiny_models.make_qwen3_5, 16, {**WIDE, "moe": True}),
}
"""What makes each model, from which seed, and its settings."""


@pytest.fixture(scope="module")
def plain_transformers():
    """Delta nets imported as if flash-linear-attention were not there, whose kernels take no CPU tensors, and
    in float64 throughout: in float32 transformers' gradient of a decay is off by up to 6e-4."""
    with pytest.MonkeyPatch.context() as patch:
        for package in ("fla", "causal_conv1d"):
            patch.setitem(sys.modules, package, None)
        for family in DELTA_NETS:
            module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
            source, exact = Path(module.__file__).read_text(), dict(vars(module))
            source = source.replace("torch.float32", "torch.float64").replace(".float()", ".double()")
            exec(compile(source, module.__file__, "exec"), exact)
            for name, value in exact.items():
                patch.setitem(vars(module), name, value)
        yield


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory, plain_transformers):
    directory = tmp_path_factory.mktemp("models")
    return {
        name: make(directory / name, seed, std=0.08, **settings)
        for name, (make, seed, settings) in MODELS.items()
    }


def draw_batch(vocabulary=VOCAB_SIZE):
    """(input ids, targets, weights), each [N], of all sequences end to end. No padding ids: transformers
    gives those no gradient."""
    generator = torch.Generator().manual_seed(0)
    tokens = sum(LENGTHS)
    ids = torch.randint(1, vocabulary, (tokens,), generator=generator)
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator)
    weights = torch.rand(tokens, generator=generator)
    weights[-LENGTHS[-1] :] = 0
    return ids, targets, weights / weights.sum()


@pytest.fixture(scope="module")
def expected(checkpoints):
    """Return (logits [N, vocabulary], loss, gradients by checkpoint name) of a model from transformers."""
    return functools.cache(lambda name: transformers_result(checkpoints[name]))


def transformers_result(path):
    from transformers import AutoModelForCausalLM

    dtype = torch.float64 if read_hf_config(path).is_recurrent else torch.float32
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    )
    ids, targets, weights = draw_batch(model.config.vocab_size)
    logits = torch.cat([model(sequence[None]).logits[0] for sequence in ids.split(LENGTHS)])
    loss = (F.cross_entropy(logits, targets, reduction="none") * weights).sum()
    loss.backward()
    prefix = read_hf_config(path).hf_prefix  # transformers has the text model alone, unwrapped
    gradients = {name.replace("model.", prefix, 1): p.grad for name, p in model.named_parameters()}
    return logits.detach(), loss.item(), dict(one_tensor_per_expert(gradients))


def built(world, path, parallel_config, model_config, libraries=LOCAL):
    """Return this rank's part of a model with the weights of a checkpoint, and its shape."""
    from megatron_ibpo.policy import parallel
    from megatron_ibpo.policy.model import build_model
    from megatron_ibpo.weights.formats.load import load_hf

    parallel.initialize(parallel_config, world, seed=0)
    shape, config = read_hf_config(path), Config(model=model_config, parallel=parallel_config)
    chunks = build_model(shape, config, device=DEVICE, libraries=libraries)
    load_hf(chunks, shape, path)
    return chunks, shape


def megatron_results(world, cases, bf16, libraries):
    """Return for each case logits and loss on the first TP rank of the last stage, gradients on rank 0."""
    return [megatron_result(world, path, parallel, bf16, libraries) for path, parallel in cases]


def megatron_result(world, path, parallel_config, bf16, libraries):
    from megatron.core import distributed, parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
    from megatron.core.utils import get_model_config

    from megatron_ibpo.models.weight_map import weight_map
    from megatron_ibpo.policy import parallel
    from megatron_ibpo.weights.layout.export import HFExport

    model_config = ModelConfig(bf16=bf16, allow_local_modules=True)
    chunks, shape = built(world, path, parallel_config, model_config, libraries)
    core, reduced = get_model_config(chunks[0]), distributed.DistributedDataParallelConfig
    model = distributed.DistributedDataParallel(core, reduced(grad_reduce_in_fp32=True), chunks[0])
    core.finalize_model_grads_func = distributed.finalize_model_grads
    seen = {}

    def loss_of(logits_1NV):
        _, targets, weights = draw_batch(shape.vocab_size)
        logits = gather_from_tensor_model_parallel_region(logits_1NV)[0, :, : shape.vocab_size].float()
        loss = (F.cross_entropy(logits, targets.to(DEVICE), reduction="none") * weights.to(DEVICE)).sum()
        seen.update(logits=logits.detach().cpu(), loss=loss.item())
        return loss, {}

    def forward(_, chunk):
        ids, positions, packed = packed_inputs(shape.vocab_size)
        return chunk(ids, positions, None, packed_seq_params=packed), loss_of

    model.zero_grad_buffer()
    get_forward_backward_func()(
        forward_step_func=forward, data_iterator=None, model=[model], num_microbatches=1,
        seq_length=sum(LENGTHS), micro_batch_size=1, forward_only=False,
    )  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.main_grad)
    entries = weight_map(shape).values()  # some are held among the weights of layers and not trained
    frozen = {piece.name for entry in entries if entry.dtype is not None for piece in entry.pieces}
    exported = ((name, grad) for name, grad in HFExport([model], shape) if name not in frozen)
    gradients = {name: grad.float().cpu().clone() for name, grad in exported if grad is not None}
    is_first = parallel_state.get_tensor_model_parallel_rank() == 0
    speaks = parallel_state.is_pipeline_last_stage() and is_first
    parallel.destroy()
    return seen if speaks else None, gradients


def packed_inputs(vocabulary=VOCAB_SIZE):
    from megatron.core.packed_seq_params import PackedSeqParams

    ids, _, _ = draw_batch(vocabulary)
    boundaries = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    ends = boundaries.to(DEVICE)
    packed = PackedSeqParams("thd", ends, ends, max_seqlen_q=max(LENGTHS), max_seqlen_kv=max(LENGTHS))
    return ids[None].to(DEVICE), positions[None].to(DEVICE), packed


SLOW = [(4, CASES), *((size, MORE_CASES) for size in MORE_CASES)]


@pytest.mark.parametrize(
    ("size", "cases"), [(1, CASES), (2, CASES), *(pytest.param(*own, marks=pytest.mark.slow) for own in SLOW)]
)
def test_logits_loss_and_gradients_equal_those_of_transformers(checkpoints, expected, size, cases):
    compare(checkpoints, expected, size, close_in_float32, cases=cases)


@pytest.mark.parametrize("size", CASES if DEVICE == "cuda" else [pytest.param(1, marks=pytest.mark.slow)])
def test_they_are_close_in_bfloat16(checkpoints, expected, size):
    compare(checkpoints, expected, size, close_in_bfloat16)


def test_a_model_with_every_kind_of_layer_is_close_in_bfloat16(checkpoints, expected):
    compare(checkpoints, expected, 1, close_in_bfloat16, cases={1: {"next": [layout()], "oss": [layout()]}})


@pytest.mark.skipif(DEVICE == "cpu", reason="needs GPUs")
@pytest.mark.parametrize("family", ["dense", "next", "3.5"])
@pytest.mark.parametrize("size", CASES)
def test_so_are_those_of_the_libraries_that_are_installed(checkpoints, expected, size, family):
    """Transformer Engine, flash-linear-attention, or both."""
    if not any(importlib.util.find_spec(name) for name in ("transformer_engine", "fla")):
        pytest.skip("neither Transformer Engine nor flash-linear-attention is installed")
    compare(checkpoints, expected, size, close_in_bfloat16, libraries=None, family=family)


def compare(checkpoints, expected, size, check, libraries=LOCAL, family="", cases=CASES):
    """Compare the models that have `family` in their names. `libraries` compute the layers; None: those that
    are installed."""
    if DEVICE == "cuda" and torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs")
    chosen = [(name, one) for name, layouts in cases[size].items() if family in name for one in layouts]
    paths = [(Path(checkpoints[name]), parallel) for name, parallel in chosen]
    by_rank = run_ranks(megatron_results, size, paths, check is close_in_bfloat16, libraries, timeout=240)
    for number, (name, parallel) in enumerate(chosen):
        seen = next(results[number][0] for results in by_rank if results[number][0])
        found = seen["logits"], seen["loss"], by_rank[0][number][1]
        check(found, expected(name), name, f"{name} {parallel}")


def close_in_float32(found, expected, name, case):
    has_delta_nets = "next" in name or "3.5" in name
    bound = DELTA_NET_BOUND if has_delta_nets else BOUND
    gradient_bound = DELTA_NET_GRADIENT_BOUND if has_delta_nets else GRADIENT_BOUND
    assert (found[0] - expected[0]).abs().max() < bound, case
    assert found[1] == pytest.approx(expected[1], abs=1e-5), case
    assert found[2].keys() == expected[2].keys(), case
    for tensor, gradient in expected[2].items():
        assert gradient.abs().max() > 0, (case, tensor, "would not be tested")
        error = (found[2][tensor] - gradient).abs().max() / gradient.abs().max()
        assert error < gradient_bound, (case, tensor, float(error))
    assert norm(found[2]) == pytest.approx(norm(expected[2]), rel=1e-5), case


def close_in_bfloat16(found, expected, name, case):
    """Compare on average: single tokens differ more where rounding sends them to another expert."""
    assert (found[0] - expected[0]).abs().mean() < 0.1 * expected[0].std(), case
    assert found[1] == pytest.approx(expected[1], rel=0.01), case
    assert norm(found[2]) == pytest.approx(norm(expected[2]), rel=0.05), case


def norm(tensors):
    return sum(tensor.square().sum().item() for tensor in tensors.values()) ** 0.5


@pytest.mark.skipif(DEVICE == "cuda", reason="kernels may add in another order")
@pytest.mark.world(1)
def test_recomputed_activations_give_the_same_gradients(world, tmp_path):
    """Of attention, and of whole layers."""
    from megatron_ibpo.policy import parallel

    path, found = tiny_models.make_qwen3_next(tmp_path / "next", 7, value_heads=4, std=0.08), []
    for kind in ("none", "selective", "full"):
        config = ModelConfig(recompute_granularity=kind, allow_local_modules=True)
        (chunk,), _ = built(world, path, layout(), config, libraries=None)
        ids, positions, packed = packed_inputs()
        chunk(ids, positions, None, packed_seq_params=packed).square().sum().backward()
        parallel.destroy()
        found.append({name: parameter.grad for name, parameter in chunk.named_parameters()})
    for name, gradient in found[0].items():
        assert all(torch.equal(gradients[name], gradient) for gradients in found[1:]), name
