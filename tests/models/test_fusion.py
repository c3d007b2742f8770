"""Fused parts of the local layers compute what plain torch computes. Their speed is for `tests/gpu.sh`."""

import json
import os
import subprocess
import sys
import warnings
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from megatron_ibpo.config import ModelConfig
from megatron_ibpo.models import fusion
from megatron_ibpo.models.backends import LOCAL, Backends, served_by
from support import flash_attention
from support.fused_record import RECORD, expected, sources_hash
from support.layouts import layout
from support.model_passes import loaded
from support.paths import ROOT, TESTS
from support.tiny_models import make_gpt_oss, make_qwen3, make_qwen3_next

FUSED = Backends(transformer_engine=False, flash_linear_attention=False, fused=fusion.FUSIONS)


@pytest.fixture
def no_failures(monkeypatch):
    monkeypatch.setattr(fusion, "FAILURES", {})


def random(*sizes, dtype=torch.float64, seed=0):
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def results(function, *inputs, settings=()):
    """The function's value and the gradients of its inputs."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    output = function(*leaves, *settings)
    return [output, *torch.autograd.grad(output, leaves, random(*output.shape, seed=9).to(output.dtype))]


def assert_equal(computed, plain, error=1e-12):
    for one, other in zip(computed, plain, strict=True):
        assert one.shape == other.shape
        assert torch.allclose(one, other, rtol=error, atol=error)


@pytest.mark.parametrize("lengths", [[1], [3, 1, 20, 2], [5, 0, 9]])
@pytest.mark.parametrize(("heads", "groups", "size"), [(4, 2, 64), (3, 1, 128), (2, 2, 256)])
@pytest.mark.parametrize("window", [None, 4])
def test_flash_attention_equals_the_rectangles(lengths, heads, groups, size, window):
    from megatron_ibpo.models.packed_attention import attend_in_rectangles

    flash_attention.register()
    ends = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    inputs = [random(sum(lengths), n, size, seed=n) for n in (heads, groups, groups)]
    plain = partial(attend_in_rectangles, ends, None, window)
    assert_equal(
        results(partial(fusion.attend, ends, max(lengths), window), *inputs), results(plain, *inputs)
    )


@pytest.fixture
def checkpoint(make, tmp_path):
    """Made before there are ranks: transformers writes nothing where torch.distributed's rank is not 0."""
    make_checkpoint, seed, settings = make
    return make_checkpoint(tmp_path / "model", seed, std=0.08, **settings)


@pytest.mark.parametrize(
    ("ranks", "make", "parallel"),
    [
        pytest.param(1, (make_qwen3, 1, {}), layout(), marks=pytest.mark.slow),
        (2, (make_qwen3, 1, {}), layout(tp=2, sequence_parallel=True)),
        (2, (make_qwen3, 1, {}), layout(cp=2)),
        (1, (make_qwen3_next, 2, {"value_heads": 4}), layout()),
        pytest.param(1, (make_gpt_oss, 3, {}), layout(), marks=pytest.mark.slow),
    ],
)
def test_a_fused_model_has_the_plain_ones_loss_and_gradients(world, checkpoint, ranks, make, parallel):
    from megatron_ibpo.policy import parallel as groups

    flash_attention.register()
    seen = []
    for libraries, recompute in ((LOCAL, "none"), (FUSED, "none"), (FUSED, "selective"), (FUSED, "full")):
        override = ("moe_router_dtype=fp64",) if make[0] is not make_qwen3 else ()
        model = ModelConfig(recompute_granularity=recompute, model_override=override)
        (chunk,), _ = loaded(world, checkpoint, parallel, model, libraries=libraries)
        chunk.double()
        seen.append(loss_and_gradients(chunk, world))
        groups.destroy()
    for computed in seen[1:]:
        assert computed.keys() == seen[0].keys()
        for name, plain in seen[0].items():
            assert torch.allclose(computed[name], plain, rtol=1e-9, atol=1e-12), name


LENGTHS = [5, 1, 12, 2]


def loss_and_gradients(chunk, world):
    from megatron.core.packed_seq_params import PackedSeqParams

    from megatron_ibpo.models import packed

    group = chunk.config.context_parallel_size
    lengths = torch.tensor(LENGTHS) * 2 * group
    ends = torch.cat((torch.zeros(1), lengths.cumsum(0))).int()
    total, longest = int(ends[-1]), int(lengths.max())
    ids = torch.randint(1, 64, (total,), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(n) for n in lengths.tolist()])
    if group > 1:
        own = packed.tokens(ends, group).chunk(group)[world.rank]
        ids, positions = ids[own], positions[own]
    packed = PackedSeqParams("thd", ends, ends, max_seqlen_q=longest, max_seqlen_kv=longest)
    loss = chunk(ids[None], positions[None], None, packed_seq_params=packed).square().sum()
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in chunk.named_parameters()}
    return {"loss": loss.detach(), **gradients}


class RefusedToCompile(Exception):
    pass


def test_an_uncompilable_part_falls_back_to_torch_with_one_warning(monkeypatch, no_failures):
    attempts = []

    def compile_nothing(function, **_):
        def refuse(*arguments):
            attempts.append(arguments)
            raise RefusedToCompile("no compiler here\nand a trace")

        return refuse

    monkeypatch.setattr(torch, "compile", compile_nothing)
    double = fusion.Compiled("doubling", lambda x: 2 * x, rows=(0,))
    with pytest.warns(
        UserWarning, match="doubling is computed in plain torch.*RefusedToCompile: no compiler here$"
    ):
        assert torch.equal(double(torch.ones(3)), torch.full((3,), 2.0))
    with warnings.catch_warnings(action="error"):
        assert torch.equal(double(torch.ones(3)), torch.full((3,), 2.0))
    assert len(attempts) == 1
    assert [*fusion.FAILURES] == ["doubling"]


def test_memory_that_runs_out_is_no_failure_of_the_compiler(monkeypatch, no_failures):
    def exhaust(_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "compile", lambda function, **_: exhaust)
    with pytest.raises(torch.OutOfMemoryError):
        fusion.Compiled("doubling", lambda x: 2 * x, rows=(0,))(torch.ones(3))
    assert not fusion.FAILURES


@pytest.fixture
def nothing_compiled():
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.usefixtures("nothing_compiled")
def test_parts_that_fail_on_this_device_are_left_out(shapes, monkeypatch, no_failures):
    from megatron_ibpo.models import fusion_check

    flash_attention.register()
    for dtype in (torch.float32, torch.bfloat16):
        assert fusion_check.working_parts(fusion.FUSIONS, shapes["dense"], dtype, "cpu") == fusion.FUSIONS
    assert served_by(shapes["dense"], FUSED, bf16=True)["norms"] == ("torch", "compiled")

    monkeypatch.setattr(fusion, "attend", lambda *_: 1 / 0)
    wrong = fusion.Compiled(fusion.ROTARY, lambda x, cos, sin: x * cos.mean(-1, True), rows=(0, 1, 2))
    monkeypatch.setattr("megatron_ibpo.models.local_modules.compiled_rotate", wrong)
    with pytest.warns(UserWarning, match="in plain torch") as warned:
        parts = fusion_check.working_parts(fusion.FUSIONS, shapes["dense"], torch.bfloat16, "cpu")
    assert parts == {fusion.NORM, fusion.ACTIVATION}
    said = " ".join(str(warning.message) for warning in warned)
    assert "rotary is computed in plain torch" in said
    assert "the result is" in said
    assert "ZeroDivisionError" in said
    assert "padded rectangles" in served_by(shapes["dense"], FUSED, bf16=True)["attention"][1]


def test_a_wrong_gradient_is_noticed():
    from megatron_ibpo.models.fusion_check import difference

    inputs = [random(8, 4, dtype=torch.float32), random(4, dtype=torch.float32, seed=1)]
    assert difference(torch.mul, torch.mul, inputs) is None
    assert "gradient of input 2" in difference(lambda x, y: x * (2 * y - y.detach()), torch.mul, inputs)
    assert "gradient of input 1 is nan" in difference(lambda x, y: (x - x).sqrt() + x * y, torch.mul, inputs)


@pytest.mark.usefixtures("no_failures")
def test_the_fusion_check_uses_a_ranks_widths_and_ends(shapes, monkeypatch):
    from megatron_ibpo.models import fusion_check

    def sizes(shape, shards):
        examples = fusion_check.examples(shape, torch.bfloat16, "cpu", shards)
        return {part: [[*inputs[0].shape[1:]] for *_, inputs in examples[part]] for part in examples}

    shape = replace(shapes["next"], ffn_hidden_size=96)
    heads, groups = shape.num_attention_heads // 2, shape.num_key_value_heads // 2
    assert sizes(shape, (2, 4)) == {
        "norm": [[1, shape.hidden_size], [1, heads, shape.head_dim], [1, groups, shape.head_dim]],
        "rotary": [[heads, shape.head_dim], [groups, shape.head_dim]],
        "activation": [[1, 96], [1, shape.shared_expert_hidden_size], [shape.expert_hidden_size // 2]],
        "attention": [[heads, shape.head_dim]],
    }
    tried = []
    monkeypatch.setattr(fusion_check, "_try", lambda part, _: tried.append(part))
    for seconds, number in ((60.0, 9), (-1.0, 4)):
        tried.clear()
        monkeypatch.setattr(fusion_check, "SECONDS", seconds)
        fusion_check.working_parts(fusion.FUSIONS, shape, torch.bfloat16, "cpu")
        assert (len(tried), {*tried[:4]}) == (number, fusion.FUSIONS)


@pytest.mark.world(2)
def test_a_part_that_fails_on_one_rank_is_dropped_everywhere(world):
    from megatron_ibpo.models import fusion_check

    if world.rank == 1:
        fusion.leave_out(fusion.ROTARY, "no compiler")
    fusion_check._agree(fusion.FUSIONS, "cpu")
    reason = "no compiler" if world.rank == 1 else "it failed on another rank"
    assert {fusion.ROTARY: reason} == fusion.FAILURES


@pytest.mark.slow
@pytest.mark.new_process
@pytest.mark.usefixtures("new_process")
def test_gradients_that_cannot_be_compiled_are_computed_in_plain_torch():
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    def refuse(*_):
        raise RefusedToCompile("no gradients")

    fusion.compile_gradients_at_once()
    backend = aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph), bw_compiler=refuse)
    double = fusion.Compiled("doubling", lambda x: x * x, rows=(0,))
    with compiled_by(backend):
        x = torch.arange(3.0, requires_grad=True)
        with pytest.warns(UserWarning, match="doubling is computed in plain torch.*no gradients"):
            loss = double(x).sum()
        loss.backward()
    assert torch.equal(x.grad, torch.tensor([0.0, 2.0, 4.0]))
    assert [*fusion.FAILURES] == ["doubling"]
    fusion.FAILURES.clear()


@contextmanager
def compiled_by(backend):
    """torch.compile with this backend."""
    torch_compile = torch.compile
    torch.compile = lambda f, **named: torch_compile(f, **named | {"backend": backend, "options": None})
    yield
    torch.compile = torch_compile


@pytest.mark.new_process
@pytest.mark.usefixtures("new_process")
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        ("aot_eager", torch.float64),
        pytest.param("inductor", torch.float64, marks=pytest.mark.slow),
        pytest.param("inductor", torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_one_compilation_serves_every_number_of_rows_and_changes_nothing(backend, dtype, tmp_path):
    from torch._dynamo.utils import counters

    from megatron_ibpo.models import fusion_check, local_modules

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path)  # not one that another process fills
    for part, rows_of, weight, settings in (
        (local_modules.compiled_rms_norm, [(1, 64)], [(64,)], (1e-6, False)),
        (local_modules.compiled_rms_norm, [(1, 3, 128)], [(128,)], (1e-6, True)),
        (local_modules.compiled_rotate, [(2, 256), (1, 64), (1, 64)], [], ()),
    ):
        counters.clear()
        fused, plain = fusion.Compiled(part.part, part.function, part.rows), part.function
        for rows in (5, 64, 2, 1, 0, 300):
            inputs = [random(*size, dtype=dtype) for size in [*((rows, *s) for s in rows_of), *weight]]
            if part.part == fusion.ROTARY:
                inputs[1:] = map(local_modules.wide, inputs[1:])  # as cosines and sines are
            with compiled_by(backend) if backend == "aot_eager" else nullcontext():
                computed, wanted = (results(f, *inputs, settings=settings) for f in (fused, plain))
            assert_equal(computed, wanted, 1e-12 if dtype == torch.float64 else 0.05)
        if dtype == torch.bfloat16:
            for value, other in zip(computed[:2], wanted[:2], strict=True):  # rounded at the same places
                assert (value != other).float().mean() < 0.02
            assert not fusion_check.difference(
                lambda *x, f=fused, s=settings: f(*x, *s), lambda *x, f=plain, s=settings: f(*x, *s), inputs
            )
        assert counters["stats"]["unique_graphs"] == 1, (part.part, dtype)
    assert not fusion.FAILURES


def test_compiled_kernels_move_few_bytes_and_fit_into_registers():
    record = json.loads(RECORD.read_text())
    assert record["hash"] == sources_hash(), "`python -m support.fused_kernels --save` counts again"
    assert record["expected"] == expected(record["parts"])
    most = {"norm": 0.08, "rotation": 0.21, "activation": 0.45, "attention": 0.31}  # of the plain bytes
    for part in record["parts"]:
        plain, fused = part["plain"]["bytes_per_token"], part["fused"]["bytes_per_token"]
        assert 0 < fused < most[part["part"].split()[0]] * plain, part["part"]
        for kernel in part["fused"]["kernels"]:
            assert (kernel["stack"], kernel["spills"]) == (0, 0), part["part"]


@pytest.mark.slow  # half a minute
def test_the_kernels_are_made_without_a_gpu_as_recorded():
    own = os.environ | {"PYTHONPATH": f"{TESTS}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "support.fused_kernels"]
    printed = subprocess.run(command, env=own, capture_output=True, text=True, check=True, timeout=290).stdout
    made = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    recorded = json.loads(RECORD.read_text())["parts"]
    for part, expected_part in zip(made, recorded, strict=True):
        assert part["part"] == expected_part["part"]
        for way in ("plain", "fused"):
            assert part[way]["bytes_per_token"] == pytest.approx(expected_part[way]["bytes_per_token"])


@pytest.mark.parametrize("zero_centered", [False, True], ids=["plain", "zero-centred"])
def test_a_norms_gradient_is_that_of_autograd(zero_centered):
    from megatron_ibpo.models import local_modules

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 2, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(8, generator=generator, dtype=torch.float64, requires_grad=True)
    normalize = local_modules.norm_function(SimpleNamespace(fused=frozenset()))
    assert torch.autograd.gradcheck(lambda x, weight: normalize(x, weight, 1e-6, zero_centered), (x, weight))
    for dtype in (torch.float32, torch.bfloat16):
        bound = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2**-6, "atol": 2**-6}
        rows, scale = inputs = [tensor.detach().to(dtype).requires_grad_() for tensor in (x, weight)]
        normed = normalize(rows, scale, 1e-6, zero_centered)
        expected = local_modules.rms_norm(rows, scale, 1e-6, zero_centered)
        assert torch.equal(normed, expected), dtype
        grads = [
            torch.autograd.grad(output, inputs, torch.ones_like(output)) for output in (normed, expected)
        ]
        torch.testing.assert_close(*grads, **bound)
        (frozen,) = torch.autograd.grad(normalize(rows, scale.detach(), 1e-6, zero_centered).sum(), rows)
        assert torch.equal(frozen, grads[0][0]), dtype
