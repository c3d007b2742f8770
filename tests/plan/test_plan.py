import io
import os
import re
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from rich.console import Console

from megatron_ibpo.basics.distributed import World
from megatron_ibpo.basics.rendezvous import environment_number
from megatron_ibpo.config import ParallelConfig
from megatron_ibpo.models import read_hf_config
from megatron_ibpo.models.cost import inference_elements, kept_elements
from megatron_ibpo.plan import memory
from megatron_ibpo.plan.feasibility import make_plan, not_counted, peaks, sequences, tightest
from megatron_ibpo.plan.memory import communicators, kv_bytes, rank_memory, state_bytes_per_sequence
from megatron_ibpo.plan.run_plan import FITS, REFUSED, in_short, plan_run
from megatron_ibpo.policy.overrides import read_overrides
from support import published_recipes
from support.paths import ROOT
from support.published_recipes import DENSE_4B, DENSE_32B, MIXTURE_30B, NEXT_80B, configured
from support.tiny_models import make_qwen3_next

GIB = 1024**3
IN_HOST = "--use-precision-aware-optimizer --optimizer-cpu-offload"


def plan_of(model, world_size, *flags):
    return make_plan(configured(model, *flags), world_size)


def in_short_of(model, recipe, gpus, memory_gib):
    config = configured(model, "--dry-run-gpu-memory-gib", str(memory_gib), recipe=recipe)
    plan = make_plan(config, gpus)
    return plan, in_short(plan)


def printed(model, *flags):
    screen = io.StringIO()
    status = plan_run(configured(model, *flags), Console(file=screen, width=140))
    return status, screen.getvalue()


@pytest.fixture(scope="module")
def plan_80b(planner):
    return planner(plan_of, NEXT_80B, 32)


def shown(planner, model, *flags, gpus):
    status, text = planner(printed, model, "--dry-run-world-size", str(gpus), *flags)
    assert status == FITS
    return text


@pytest.mark.parametrize(
    ("name", "gpus", "flags", "parameters"),
    [
        ("qwen3_5_0_8b", 1, "", 752_393_024),
        ("llama_3_1_8b", 8, "--tensor-model-parallel-size 2", 8_030_261_248),
        ("qwen2_5_7b", 8, "--tensor-model-parallel-size 2", 7_615_616_512),
        ("gpt_oss_20b", 8, "", 20_914_757_184),
        # without the layer that is carried along: 46 layers in four stages
        ("glm_4_5_air", 32, "--decoder-first-pipeline-num-layers 11 --decoder-last-pipeline-num-layers 11",
         106_852_245_504),
        pytest.param("llama_3_1_70b", 64, IN_HOST, 70_553_706_496, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_other_families_fit_with_recipes_for_their_size(planner, name, gpus, flags, parameters):
    """They have as many parameters as their makers say; of Qwen3.5, which also sees, the text model's."""
    model = ROOT / "examples/models" / name
    plan = planner(plan_of, model, gpus, *flags.split())
    assert plan.problems == []
    assert tightest(plan).free_bytes > 5 * GIB
    assert plan.census.total == parameters
    if "glm" in name:
        # the first stage has a dense layer, the others experts in all of theirs, 16 of 128 on a rank
        experts = [layers * 16 * 3 * 4096 * 1408 for layers in (10, 12, 12, 11)]
        assert [part.experts for part in plan.census.stages] == experts


DEMANDS = [
    *(
        (f"{model}_ibpo", model, gpus, 80)
        for model, gpus in published_recipes.WRITTEN_FOR.items()
        if gpus > 1
    ),
    *((recipe, model, 1, memory) for recipe, (model, memory) in published_recipes.ONE_GPU.items()),
]
CASES = [
    pytest.param(*demand, id=demand[0], marks=pytest.mark.slow if "235b" in demand[0] else ())
    for demand in DEMANDS
]


@pytest.mark.parametrize(("name", "model", "gpus", "memory"), CASES)
def test_a_recipe_states_its_needs_and_fits(planner, name, model, gpus, memory):
    recipe = ROOT / f"examples/recipes/{name}.yaml"
    plan, short = planner(in_short_of, ROOT / "examples/models" / model, recipe, gpus, memory)
    assert plan.problems == []
    assert tightest(plan).free_bytes > 5 * GIB, "room for what no formula gives"
    comments = re.findall(r"^# (.*)", recipe.read_text(), re.MULTILINE)
    assert short in " ".join(comments), f"write this line into the recipe's head: {short}"


def test_the_80b_recipe_fits_32_gpus_and_counts_every_parameter(plan_80b):
    plan = plan_80b
    assert plan.problems == []
    assert plan.census.total == 79_674_391_296
    ranks = [plan.census.place(rank) for rank in range(32)]
    places = {(part.tensor, part.pipeline, part.data) for part in ranks}
    assert places == {(t, p, d) for t in range(2) for p in range(4) for d in range(4)}
    assert {(part.pipeline, part.expert) for part in ranks} == {(p, e) for p in range(4) for e in range(8)}
    assert [part.pipeline for part in ranks] == [rank // 8 for rank in range(32)], "one stage a node"
    # twelve layers with an eighth of the experts
    assert {part.experts for part in plan.census.stages} == {12 * 512 // 8 * 3 * 2048 * 512}
    assert plan.placement.owners == [0, 8, 16, 24]
    assert plan.placement.partners == [tuple(range(first, first + 8)) for first in (0, 8, 16, 24)]


def test_the_80b_recipe_trains_131072_tokens_on_four_context_ranks(planner, plan_80b):
    """Each rank has as many tokens, and as much optimizer state, as by the recipe at 32,768."""
    context = ["--rollout-max-context-len", "131072"]
    alone = planner(plan_of, NEXT_80B, 32, *context)
    assert any(problem.startswith("training takes") for problem in alone.problems)
    plan = planner(plan_of, NEXT_80B, 32, *context, "--context-parallel-size", "4")
    assert plan.problems == []
    assert tightest(plan).free_bytes > 5 * GIB
    assert plan.census.data_parallel == 4, "one copy of the data, on four ranks"
    for shared, whole in zip(plan.stages, plan_80b.stages, strict=True):
        assert (shared.state, shared.host_optimizer) == (whole.state, whole.host_optimizer)
        assert shared.logits == whole.logits
        assert 1 < shared.activations / whole.activations < 1.2, "keys, values and states on their way"


def test_bytes_of_weights_gradients_and_sharded_optimizer_state(planner, plan_80b):
    def stages(*flags):
        return planner(plan_of, NEXT_80B, 32, *flags).stages

    plan = plan_80b
    part, first = plan.census.stages[0], plan.stages[0]
    every, own = part.dense + part.experts, part.dense // 4 + part.experts
    assert (plan.census.data_parallel, plan.census.expert_data_parallel) == (4, 1)
    assert (first.weights, first.gradients) == (2 * every, 4 * every), "bf16 and fp32"
    # weight, gradient and two means in fp32; experts have no data-parallel copies here
    assert (first.optimizer, first.host_optimizer) == (0, 16 * own)
    on_gpu = stages("--no-optimizer-cpu-offload")[0]
    assert (on_gpu.optimizer, on_gpu.host_optimizer) == (12 * own, 0), "weight and two means in fp32"
    plain = ["--no-optimizer-cpu-offload", "--no-use-precision-aware-optimizer"]
    assert stages(*plain)[0].optimizer == 12 * own
    assert stages(*plain, "--no-use-distributed-optimizer")[0].optimizer == 12 * every
    assert first.logits == 0, "only the last stage has logits"
    logits = 32768 * 151936 // 2 * 2
    assert logits < plan.stages[-1].logits < 1.1 * logits
    fused = stages("--fuse-lm-head")[-1].logits
    assert fused == 4096 * 151936 // 2 * 2 + 2 * 151936 // 2 * 2048 * 4, "a chunk, and two fp32 gradients"
    measuring = stages("--gradient-meter-interval", "10")[0]
    assert (first.second_gradients, measuring.second_gradients) == (0, first.gradients)
    assert measuring.training - first.training == first.gradients


def test_a_process_holds_cuda_and_communicators_before_any_tensor(planner, plan_80b):
    """.75 GiB for CUDA, and .4 for each group of ranks that NCCL connects."""
    groups = communicators(plan_80b.shape, plan_80b.config, plan_80b.census)
    dense = {"tensor": 2, "pipeline": 4, "data": 4, "gradient norm": 32, "all": 32}
    assert groups == dense | {"expert": 8, "experts of a layer": 8}
    assert plan_80b.stages[0].process == pytest.approx((0.75 + 7 * 0.4) * GIB, abs=10)
    assert plan_80b.engine.asleep == pytest.approx((0.75 + 2 * 0.4 + 1) * GIB, abs=10), "and CUDA graphs"
    alone = planner(plan_of, ROOT / "examples/models/qwen3_0_6b", 1)
    assert alone.stages[0].process == 0.75 * GIB
    assert alone.engine.asleep == 1.75 * GIB


HYBRID, DENSE = read_hf_config(NEXT_80B), read_hf_config(DENSE_32B)


def test_kept_activations_match_a_count_by_hand():
    """Beside six hidden states around norms: of attention what is projected, normed and rotated, read out,
    and twice a gate; of a delta net what is projected, convolved and read out, repeated keys, states."""

    def kept(shape, layer, parallel=ParallelConfig()):  # noqa: B008
        return kept_elements(shape, parallel, layer, ("mlp", "moe")) - 6 * shape.hidden_size

    query, key = 64 * 128, 8 * 128
    assert kept(DENSE, 0) == (query + 2 * key) + 2 * (query + key) + query
    query, key = 16 * 256, 2 * 256
    assert kept(HYBRID, 3) == (query + 2 * key) + 2 * (query + key) + query + 2 * query
    keys, values = 16 * 128, 32 * 128
    projected, convolved, states = 2 * (keys + values + 32), 2 * keys + values, values * 128 // 64
    alone = projected + convolved + 2 * values + 3 * values + states
    assert kept(HYBRID, 0) == alone
    # passed on are matrices of 128 keys for each of 32 heads, once per chunk of 64 tokens
    two = ParallelConfig(context_parallel_size=2)
    assert kept(HYBRID, 0, two) - alone == (2 + 128 // 64) * 32 * 128
    assert kept(HYBRID, 0, replace(two, delta_net_cp="heads")) == alone
    # attention's core apart: what stands around it keeps its input and output

    def dropped(shape, *modules):
        return kept_elements(shape, ParallelConfig(), 0) - kept_elements(shape, ParallelConfig(), 0, modules)

    assert dropped(DENSE, "mlp") == 4 * 25600
    assert dropped(DENSE, "moe") == dropped(HYBRID, "mlp") == 0
    assert dropped(DENSE, "core_attn") == dropped(DENSE, "layernorm") == 0
    assert dropped(HYBRID, "shared_experts") == 3 * 512
    assert dropped(HYBRID, "moe_act") == 10 * 2 * 512, "of ten experts, twice as many on the fullest rank"
    routed = 10 * 2 * (3 * 2048 + 3 * 512)
    assert dropped(HYBRID, "moe", "moe_act") == routed + 3 * 512 + 3 * 2 * 512, "and the router's, in fp32"


def test_selective_recomputation_is_counted_in_the_training_of_a_step(plan_80b):
    def activations(granularity, *overrides):
        model = replace(plan_80b.config.model, recompute_granularity=granularity, model_override=overrides)
        config, part = replace(plan_80b.config, model=model), plan_80b.census.stages[0]
        how = (read_overrides(config), part, plan_80b.census, 32768)
        return rank_memory(plan_80b.shape, config, *how).activations

    tokens, in_flight, layers, tensor = 32768, 4, 12, 2
    per_token = (10 * 2 * (3 * 2048 + 3 * 512) + 3 * 2 * 512) / tensor + 3 * 512 / tensor
    selective = activations("selective", "recompute_modules=[core_attn,moe]")
    dropped = tokens * in_flight * layers * per_token * 2
    assert activations("none") - selective == pytest.approx(dropped, rel=1e-6)
    assert activations("selective") == activations("none"), "attention's core alone"
    assert plan_80b.stages[0].activations == activations("full") < selective


def test_fp8_keeps_weight_copies_and_names_the_uncounted_rest(planner):
    model = ROOT / "examples/models/qwen3_0_6b"
    before, plan = planner(plan_of, model, 1), planner(plan_of, model, 1, "--model-override", "fp8=hybrid")
    (stage,), (part,), (plain,) = plan.stages, plan.census.stages, before.stages
    assert stage.copies == 2 * (part.parameters - 151936 * 1024), "and a transpose, of a byte each"
    assert plain.copies == 0
    for phase in ("training", "updating", "resting"):
        assert getattr(stage, phase) - getattr(plain, phase) == stage.copies
    assert [*not_counted(plan.overrides)] == ["fp8 (inputs of matrix products in lower precision)"]
    assert [*not_counted(before.overrides)] == []


def test_memory_of_an_engine(planner, plan_80b):
    """The engine has the 80 B model over 8 GPUs."""
    plan, shape = plan_80b, plan_80b.shape
    routers, embeddings = 48 * 512 * 2048, 2 * 151936 * 2048
    assert plan.engine.weights == 2 * ((79_674_391_296 - routers) // 8 + routers), "routers are copied"
    in_fp8 = planner(plan_of, NEXT_80B, 32, "--vllm-arg", "quantization=fp8_per_channel")
    assert in_fp8.engine.weights == pytest.approx(plan.engine.weights / 2 + (embeddings / 8 + routers), abs=2)
    experts_of_a_layer = 512 * 3 * 2048 * 512 * 2
    assert plan.engine.loading == experts_of_a_layer + experts_of_a_layer // 8, "whole, and the shard of it"
    # one head of 256 for keys and for values, of 12 layers
    assert kv_bytes(shape, plan.needs, 8, 1) == 12 * 2 * 256 * 2
    # 4 of 32 value heads, states of 128 x 128; 3 tokens of 8,192 / 8 channels; 36 layers
    state = 36 * 2 * (4 * 128 * 128 + 3 * (2 * 16 * 128 + 32 * 128) // 8)
    assert state_bytes_per_sequence(shape, plan.needs, 8) == state
    assert sequences(plan, 8192) == 32 * GIB / (8192 * 12288 + state)
    in_fp32 = planner(plan_of, NEXT_80B, 32, "--vllm-arg", "mamba_ssm_cache_dtype=float32")
    assert state_bytes_per_sequence(shape, in_fp32.needs, 8) == state + 36 * 2 * 4 * 128 * 128
    # room for the wider of mixer and MLP: on two GPUs half of a delta net (12,352 + 8,192 + 8,192 + 12,288 +
    # 8,192) or of an MLP; on eight the chosen experts' whole outputs, and shards of their and the shared
    # expert's inner width of 512
    assert inference_elements(HYBRID, 2) == 3 * 2048 + 49216 / 2
    assert inference_elements(DENSE, 2) == 3 * 5120 + 3 * 25600 / 2
    assert inference_elements(HYBRID, 8) == 3 * 2048 + 10 * (2048 + 64) + 3 * 64


def test_peaks_of_the_phases_and_main_memory_of_a_node(plan_80b):
    trainer, engine = plan_80b.stages[3], plan_80b.engine
    phases = peaks(plan_80b, 3)
    state = trainer.weights + trainer.gradients + trainer.optimizer
    passing = trainer.activations + trainer.logits
    assert phases["training"] == state + trainer.process + passing + int(0.05 * passing) + engine.asleep
    assert phases["saving"] == state + trainer.process + engine.asleep
    bucket, embeddings = 512 * 1024**2, 151936 * 2048 * 2
    # the largest tensor whole, and a bucket that holds it on either side
    sent = embeddings + 2 * max(bucket, embeddings)
    both = trainer.process + engine.weights + engine.asleep
    assert phases["weight update"] == both + trainer.weights + engine.loading + sent
    # the trainer's state waits in main memory
    assert phases["sampling"] == both + 32 * GIB + engine.workspace
    host = plan_80b.host
    moved_out = host["trainers' state while engines sample"]
    assert moved_out == 8 * max(stage.weights for stage in plan_80b.stages)
    assert host["the optimizer"] == 8 * max(stage.host_optimizer for stage in plan_80b.stages)
    dense, experts = max((part.dense, part.experts) for part in plan_80b.census.stages)
    # bf16 weights in four parts; 12 bytes of state, gathered on two tensor-parallel ranks of a node for what
    # is dense, on all eight for their experts; 4 on the way, and 4 in the shards of all that it comes from
    checkpoint = 2 * 79_674_391_296 // 4 + (12 + 4 + 4) * (2 * dense + 8 * experts)
    assert (host["a checkpoint being written"], host["the reference policy"]) == (checkpoint, 0)


def test_a_fitting_plan_shows_engines_nodes_and_step(planner):
    text = shown(planner, DENSE_32B, gpus=32)
    attention = 5120 * (64 + 2 * 8 + 64) * 128 + 2 * 128  # 64 heads for queries, 8 for keys and values; norms
    layer = attention + 3 * 5120 * 25600 + 2 * 5120
    expected = 64 * layer + (2 * 151936 + 1) * 5120
    assert expected == 32_762_123_264
    assert f"parameters: {expected:,}; DP 4" in text
    assert f"weight update: {2 * expected / GIB:.2f} GiB to each engine" in text
    assert "KV cache: 32,768 bytes per token" in text  # 64 layers, keys and values, 1 head of 128, bf16
    assert re.search(r"Needs 32 GPUs of 80 GiB, .*\nThis fits\. \w+", text)
    # more ranks than key-value heads: four, on eight
    assert "TP8 EP8" in shown(planner, MIXTURE_30B, "--tensor-model-parallel-size", "8", gpus=8)
    one = ["--tensor-model-parallel-size", "1", "--expert-model-parallel-size", "1", "--no-sequence-parallel"]
    said = shown(planner, ROOT / "examples/tiny_qwen3_next", *one, "--vllm-kv-cache-bytes", str(GIB), gpus=1)
    (line,) = (line for line in said.splitlines() if line.startswith("On this machine, which has no GPU"))
    total, engines = (float(re.search(part, line)[1]) for part in (r"hold ([\d.]+) GiB", r"engines ([\d.]+)"))
    assert 1 <= engines < 1.1 < total < 3, "the cache, the weights, and two programs"
    assert "Time on h100, predicted" in shown(planner, DENSE_4B, "--dry-run-hardware", "h100", gpus=8)


def test_an_impossible_plan_is_refused_with_the_reason(planner):
    for model, world_size, flags, reason in [
        (NEXT_80B, 16, "", "EP x ETP x PP = 32 does not divide the world size"),
        (NEXT_80B, 32, "--no-sequence-parallel", "needs --sequence-parallel"),
        (NEXT_80B, 32, "--rollout-num-gpus-per-engine 16", "a colocated engine lies within one node"),
        (NEXT_80B, 32, f"--vllm-kv-cache-bytes {60 * GIB}", "sampling takes .* GiB on rank"),
        (NEXT_80B, 32, "--recompute-granularity none", "training takes .* GiB on rank"),
        (NEXT_80B, 32, "--vllm-gpu-memory-utilization 0.97", "a starting engine needs that share"),
        (NEXT_80B, 32, "--vllm-kv-cache-bytes 1000000", "does not hold one context of 32768 tokens"),
        (DENSE_32B, 32, "--rollout-num-gpus-per-engine 3", "must divide the number of trainers"),
        (DENSE_32B, 32, "--expert-model-parallel-size 2", "has no experts"),
        (ROOT / "docs", 8, "", "config.json"),
    ]:
        status, text = planner(printed, model, "--dry-run-world-size", str(world_size), *flags.split())
        assert status == REFUSED, (model, world_size, flags, reason)
        refusal = text.rpartition("This cannot work:")[2]
        assert re.search(reason, refusal), refusal


@contextmanager
def as_rank(rank, world_size, config):
    """Make this process `rank` of a world without other processes, where no collective communicates."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megatron_ibpo.policy import parallel

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        world = World(rank, world_size, torch.device("cpu"), control=None)
        parallel.initialize(config.parallel, world, config.run.seed)
        try:
            yield
        finally:
            parallel.destroy()
    finally:
        dist.destroy_process_group()


def places_and_sizes(directory, world_size, *flags):
    """For every rank, what Megatron says of its place, and the size of the model that it builds."""
    from megatron.core import parallel_state as state

    from megatron_ibpo.policy.model import build_model

    config, shape, found = configured(directory, *flags), read_hf_config(directory), []
    for rank in range(world_size):
        with as_rank(rank, world_size, config):
            (chunk,) = build_model(shape, config, device="meta")
            place = (
                state.get_tensor_model_parallel_rank(), state.get_pipeline_model_parallel_rank(),
                state.get_data_parallel_rank(), state.get_expert_model_parallel_rank(),
                state.get_expert_data_parallel_rank(),
            )  # fmt: skip
            found.append((*place, sum(parameter.numel() for parameter in chunk.parameters())))
    return found


def test_one_rank_per_stage_determines_all_places_and_sizes(planner, tmp_path):
    model = make_qwen3_next(tmp_path, 0)
    for ranks, tp, pp, ep, etp in ((16, 2, 2, 4, 1), (16, 1, 2, 2, 2), (4, 2, 1, 1, 1)):
        layout = f"--tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp} "
        layout += f"--expert-model-parallel-size {ep} --expert-tensor-parallel-size {etp}"
        census = planner(plan_of, model, ranks, *layout.split()).census
        for rank, (*place, parameters) in enumerate(planner(places_and_sizes, model, ranks, *layout.split())):
            at = census.place(rank)
            assert [at.tensor, at.pipeline, at.data, at.expert, at.expert_data] == place, (ranks, rank)
            assert rank in census.ranks(at.pipeline), (ranks, rank)
            assert census.stages[at.pipeline].parameters == parameters, (ranks, rank)


def test_rows_that_pad_the_vocabulary_take_memory_and_no_bandwidth(planner, tmp_path):
    model = make_qwen3_next(tmp_path, 0, vocabulary=211)
    words = "--tensor-model-parallel-size 2 --expert-model-parallel-size 2 --max-tokens-per-gpu 16384"
    flags = [*words.split(), "--make-vocab-size-divisible-by"]
    least, more = (planner(plan_of, model, 2, *flags, multiple) for multiple in ("1", "64"))
    assert "211 ids, padded to 212 rows" in shown(planner, model, *flags, "1", gpus=2)
    rows = 128 - 106  # of embedding and head each, on each rank
    assert more.census.stages[0].dense - least.census.stages[0].dense == 2 * rows * 96
    assert more.census.total == least.census.total
    (before,), (after,) = least.stages, more.stages
    element = (after.weights - before.weights) // (2 * rows * 96)
    assert element in (2, 4)
    assert after.logits - before.logits == rows * 16384 * element
    assert memory.sync_bytes(more.census, more.config) == memory.sync_bytes(least.census, least.config)


def test_invalid_launcher_numbers_and_unshared_directories_are_refused(monkeypatch):
    command = ["bash", str(ROOT / "examples/run_qwen3_32b_ibpo.sh")]
    for variables, says in (
        ({"NODE_RANK": "a[$(exit 3)]"}, "NODE_RANK=a[$(exit 3)]: must be a whole number between"),
        ({"NNODES": "4", "RUN_DIR": ""}, "set RUN_DIR to a directory that all 4 nodes share"),
    ):
        own = {"IBPO_PYTHON": sys.executable, "MASTER_PORT": "0", "NODE_RANK": "1"} | variables
        done = subprocess.run(command, env=os.environ | own, capture_output=True, text=True, timeout=120)
        assert done.returncode == 2, (variables, says)
        assert says in done.stderr.splitlines()[-1]
    for value in ("abc", "0", "-1", "1e3", "", "9" * 5000):
        monkeypatch.setenv("WORLD_SIZE", value)
        with pytest.raises(ValueError, match="in the environment: must be a whole number between 1 and"):
            environment_number("WORLD_SIZE", 1, least=1)
