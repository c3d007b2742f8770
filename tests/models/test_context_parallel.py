"""Ranks that share every sequence compute what one rank computes, gradients included: in float64, where a
difference is not a matter of rounding. The trainer's own layouts, in float32, are in `test_trainer.py`,
`test_critic.py` and `test_saving.py`."""

import random
import shutil
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_ibpo.config import ModelConfig
from megatron_ibpo.models import packed, read_hf_config
from megatron_ibpo.models.backends import LOCAL, Backends
from support.delta_net_kernels import HostReads, kernels_stood_in
from support.example_runs import train_three_steps
from support.layouts import layout
from support.model_passes import gradients_of, loaded
from support.paths import ROOT
from support.ranks import run_ranks
from support.tiny_models import make_gpt_oss, make_qwen3, make_qwen3_next
from support.train_sequences import sequence


def test_each_rank_holds_early_and_late_chunks_of_every_sequence():
    boundaries = torch.tensor([0, 8, 12])
    assert packed.tokens(boundaries, 2).tolist() == [0, 1, 6, 7, 8, 11, 2, 3, 4, 5, 9, 10]
    assert packed.rank_positions(boundaries, 0, 2).tolist() == [0, 1, 6, 7, 0, 3]
    assert packed.rank_positions(boundaries, 1, 2).tolist() == [2, 3, 4, 5, 1, 2]
    places = packed.places(boundaries, 2)
    assert places[packed.tokens(boundaries, 2)].tolist() == list(range(12))


class BytesSent(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.bytes = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if function.namespace == "c10d" and not name.startswith("recv"):
            (given,) = args[0] if name == "send" else [args[1]]
            self.bytes[name] += given.nbytes
        return function(*args, **(kwargs or {}))


@pytest.mark.world(4)
@pytest.mark.parametrize("chunks", [[1, 40, 2, 1, 7, 33, 3], [100]])
def test_sliced_delta_nets_equal_whole_ones_with_bounded_messages(world, chunks):
    """Sequences of so many tokens per chunk, fewer than the convolution sees and across the rule's chunks.
    Three heads, which no number of ranks but three divides."""
    from megatron_ibpo.models import packed
    from megatron_ibpo.models.delta_net import state_passing
    from megatron_ibpo.models.delta_net.layer import causal_conv, gated_delta_rule
    from megatron_ibpo.policy import cpu

    cpu.activate()
    kernel, generator = 4, torch.Generator().manual_seed(1)
    boundaries = torch.tensor([0, *(torch.tensor(chunks) * 2 * world.size).cumsum(0)], dtype=torch.int32)
    mine, total = packed.tokens(boundaries, world.size).chunk(world.size)[world.rank], int(boundaries[-1])

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    drawn = {"x": draw(total, 6), "query": draw(total, 1, 5), "key": draw(total, 1, 5)}
    drawn["value"], drawn["decay"] = draw(total, 3, 4), -torch.nn.functional.softplus(2 * draw(total, 3) - 1)
    drawn |= {"beta": draw(total, 3).sigmoid(), "weight": draw(6, kernel)}
    toward = draw(total, 6), draw(total, 3, 4)

    def run(which, slices):
        own = {n: (t if n == "weight" else t[which]).clone().requires_grad_() for n, t in drawn.items()}
        q, k, v, decay, beta = (own[name] for name in ("query", "key", "value", "decay", "beta"))

        def conv(x, cu_seqlens):
            return causal_conv(x, own["weight"], packed.positions(cu_seqlens))

        with BytesSent() as sent:
            if slices is None:
                outputs = [conv(own["x"], boundaries), gated_delta_rule(q, k, v, decay, beta, boundaries)]
            else:
                outputs = [state_passing.convolve(conv, own["x"], slices)]
                outputs.append(state_passing.delta_rule(gated_delta_rule, q, k, v, decay, beta, slices))
            forward = dict(sent.bytes)
            sum((output * to[which]).sum() for output, to in zip(outputs, toward, strict=True)).backward()
        return outputs, {name: tensor.grad for name, tensor in own.items()}, forward, dict(sent.bytes)

    slices = state_passing.make_slices(boundaries, dist.group.WORLD, kernel - 1)
    outputs, gradients, forward, both = run(mine, slices)
    wholes, of_whole, *nothing = run(torch.arange(total), None)
    assert nothing == [{}, {}]
    dist.all_reduce(gradients["weight"])
    for output, whole in zip(outputs, wholes, strict=True):
        assert (output - whole[mine]).abs().max() < 1e-12
    for name, whole in of_whole.items():
        scale, own = whole.abs().max(), whole if name == "weight" else whole[mine]
        assert scale > 0.1, (name, "would not be tested")
        assert (gradients[name] - own).abs().max() < 1e-12 * scale, name
    # a state and three tokens for each chunk, and as much in the backward pass
    states, tokens = len(chunks) * 8 * 3 * 5 * 4, len(chunks) * 8 * 3 * 6
    sends = 2 if 0 < world.rank < 3 else 1  # the way turns at the last rank, and ends at the first
    assert forward == {"send": sends * states, "_allgather_base_": 2 * tokens}
    # each rank gives the gradients of all ranks' tokens back
    assert both == forward | {"send": 2 * sends * states, "_reduce_scatter_base_": 4 * 2 * tokens}


def rows():
    """Sequences of 2 tokens, which are one row and fewer than any group's ranks, to a hundred."""
    rng, made = random.Random(3), []
    for number, sizes in enumerate([(1, 1), (3, 2), (40, 61), (2, 20), (1, 3)]):
        prompt, response = ([rng.randrange(2, 64) for _ in range(size)] for size in sizes)
        mask = [rng.random() < 0.8 for _ in response]
        own = {"advantage": rng.choice([-1.5, 0.5, 1.0]), "weight": 0.25 * (1 + number), "loss_mask": mask}
        made.append(sequence(prompt, response, group=number, **own))
    return made


def losses_and_gradients(world, paths):
    return {name: (path, *loss_and_gradients(world, path, layout())) for name, path in paths.items()}


def loss_and_gradients(world, path, parallel_config, libraries=LOCAL):
    """(losses on the last stage's ranks, gradients by name on rank 0) of a checkpoint in a layout."""
    from megatron.core import parallel_state
    from megatron.core.packed_seq_params import PackedSeqParams

    from megatron_ibpo.loss import make_objective, policy_loss
    from megatron_ibpo.policy.forward_backward import _lay_out_all
    from megatron_ibpo.policy.packing import pack
    from megatron_ibpo.policy.planning import MicroBatch

    override = ("moe_router_dtype=fp64",) if read_hf_config(path).is_moe else ()
    model = ModelConfig(model_override=override)
    (chunk,), shape = loaded(world, path, parallel_config, model, libraries=libraries)
    core = chunk.config
    core.pipeline_dtype = core.params_dtype = torch.float64
    tp_group, seen = parallel_state.get_tensor_model_parallel_group(), []
    parts = rows()[:3], rows()[3:], []  # the last has no sequence
    packs = [pack(MicroBatch(tuple(range(len(part))), tuple(part))) for part in parts]
    batches = _lay_out_all(packs, torch.device("cpu"), core)

    def loss_of(batch, logits):
        width = logits.shape[-1]
        start = width * tp_group.rank()
        objective, vocabulary = make_objective("gspo", aggregation=7.0), (start, start + width)
        loss, _ = policy_loss(logits[0], batch.rows, objective, tp_group=tp_group, vocab_range=vocabulary)
        seen.append(loss.item())
        return len(batches) * loss, {}

    def forward(iterator, chunk):
        batch = next(iterator)
        ends, longest = batch.rows.cu_seqlens, batch.sequences.max_seqlen_q
        packed = PackedSeqParams("thd", ends, ends, max_seqlen_q=longest, max_seqlen_kv=longest)
        output = chunk(batch.input_ids_1N, batch.position_ids_1N, None, packed_seq_params=packed)
        return output, lambda logits: loss_of(batch, logits)

    return seen, gradients_of(chunk.double(), shape, forward, batches)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models")
    paths = {
        "dense": make_qwen3(directory / "dense", 3, std=0.1),
        # two heads in delta nets, which neither four ranks nor TP2 x CP2 divide
        "next": make_qwen3_next(directory / "next", 4, std=0.1),
        "wide next": make_qwen3_next(directory / "wide", 4, std=0.1, key_heads=4, value_heads=8),
        "oss": make_gpt_oss(directory / "oss", 5, std=0.1),
    }
    return run_ranks(losses_and_gradients, 1, paths, timeout=280)[0]


# fmt: off
TWO = {"dense": [layout(cp=2)], "next": [layout(cp=2), layout(cp=2, ep=2)], "oss": [layout(cp=2)]}
FOUR = {"dense": [layout(cp=4), layout(cp=2, tp=2), layout(cp=2, pp=2)],
        "next": [layout(cp=4), layout(cp=4, ep=2), layout(cp=2, tp=2, ep=4), layout(cp=2, pp=2, ep=2)],
        "oss": [layout(cp=4), layout(cp=2, tp=2, ep=2)]}
# fmt: on


@pytest.mark.world
@pytest.mark.parametrize(("ranks", "layouts"), [(2, TWO), pytest.param(4, FOUR, marks=pytest.mark.slow)])
def test_loss_and_gradients_are_those_of_one_rank(world, alone, ranks, layouts):
    """Through packing, models and loss; with fewer rows than ranks, and where the padding is all there is."""
    for case in [(name, chosen) for name, own in layouts.items() for chosen in own]:
        path, expected, gradients = alone[case[0]]
        losses, own = loss_and_gradients(world, path, case[1])
        assert losses in ([], pytest.approx(expected, abs=1e-12)), case
        if world.is_rank_0:
            assert own.keys() == gradients.keys(), case
            for tensor, gradient in gradients.items():
                scale = gradient.abs().max()
                assert scale > 1e-6, (case, tensor, "would not be tested")
                assert (own[tensor] - gradient).abs().max() < 1e-12 * scale, (case, tensor)


@pytest.mark.world(2)
@pytest.mark.slow
def test_passing_states_equals_exchanging_heads_around_other_kernels(world, alone):
    """The kernels themselves are for GPUs, and stood in for; Megatron's decays are of float32."""
    flash = Backends(transformer_engine=False, flash_linear_attention=True)
    path, expected, gradients = alone["wide next"]
    for way in ("state", "heads"):
        with kernels_stood_in(HostReads()):
            losses, own = loss_and_gradients(world, path, layout(cp=2, delta_net_cp=way), flash)
        assert losses == pytest.approx(expected, abs=1e-6), way
        for tensor, gradient in gradients.items() if world.is_rank_0 else ():
            assert (own[tensor] - gradient).abs().max() < 1e-4 * gradient.abs().max(), tensor


@pytest.mark.world(2)
def test_unsupported_context_parallel_libraries_are_refused(world, alone):
    from megatron_ibpo.policy import parallel

    with pytest.raises(ValueError, match="only flash-linear-attention has it"):
        loss_and_gradients(world, alone["next"][0], layout(cp=2, delta_net_cp="heads"))
    parallel.destroy()
    as_on_gpus = Backends(transformer_engine=True, flash_linear_attention=False)
    with pytest.raises(ValueError, match="cannot divide packed sequences over ranks if attention has sinks"):
        loss_and_gradients(world, alone["oss"][0], layout(cp=2), as_on_gpus)


@pytest.mark.engine
@pytest.mark.ray
@pytest.mark.slow
def test_three_steps_of_the_loop_with_ranks_that_share_sequences(tmp_path):
    model = shutil.copytree(ROOT / "examples/tiny_qwen3_next", tmp_path / "model")
    for row in train_three_steps(
        tmp_path, model, "--tensor-model-parallel-size", "1", "--context-parallel-size", "2"
    ):
        assert row["logprob_diff_abs_mean"] < 0.01  # the engine computes in bfloat16
