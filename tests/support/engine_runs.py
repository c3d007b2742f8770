import pickle
import random
from functools import cache

import torch
from safetensors.torch import load_file

from megatron_ibpo.basics.distributed import World
from megatron_ibpo.basics.records import SampleRequest, token_ids
from megatron_ibpo.config import Config, RolloutConfig
from megatron_ibpo.engines import Engine
from megatron_ibpo.engines.registry import TRANSPORTS
from megatron_ibpo.engines.vllm.settings import engine_settings
from megatron_ibpo.models import read_hf_config
from megatron_ibpo.weights.transfer.link import UpdateOrder
from megatron_ibpo.weights.transfer.update import open_transport, update_engines
from support.weight_sources import DividedWeights

CONTEXT = 256
TIMEOUT = 120.0
WORLD = World(0, 1, torch.device("cpu"), None)


class CheckpointSource(DividedWeights):
    def __init__(self, directory, world=WORLD):
        super().__init__(load_file(directory / "model.safetensors"), world.rank, world.size)


def make_config(run_dir, dtype):
    rollout = RolloutConfig(
        rollout_max_context_len=CONTEXT,
        parameters={"vllm_dtype": dtype, "vllm_kv_cache_bytes": 128 * 1024**2},
        update_weight_buffer_size=100_000, check_weight_update_equal=True,  # several buckets
    )  # fmt: skip
    config = Config(rollout=rollout)
    config.run.run_dir = run_dir
    return config


def start_engine(checkpoint, log, dtype="float32", vllm_arg=(), *, recompute_kv=True):
    rollout = make_config(log.parent, dtype).rollout
    rollout.parameters["vllm_arg"] = vllm_arg
    rollout.recompute_kv_after_update = recompute_kv
    return Engine(
        engine_settings(rollout, checkpoint, read_hf_config(checkpoint), "gloo", gpus=(), num_threads=1), log
    )


def make_requests(count, *, seed=0, temperature=1.0):
    draw = random.Random(seed)
    requests = []
    for number in range(count):
        ids = token_ids([draw.randrange(2, 64) for _ in range(draw.randint(3, 20))])
        requests.append(SampleRequest(ids, 100 * seed + number, draw.randint(1, 40), temperature))
    return requests


def ids_of(samples):
    return [sample.token_ids.tolist() for sample in samples]


@cache
def reference_model(directory, dtype=torch.float32):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()


def reference_logprobs(directory, requests, samples, dtype=torch.float32):
    """Return what transformers says of the sampled tokens; of greedy ones at temperature 1."""
    model, found = reference_model(directory, dtype), []
    for request, sample in zip(requests, samples, strict=True):
        ids = torch.tensor([[*request.prompt_token_ids, *sample.token_ids]])
        with torch.no_grad():
            logits = model(ids).logits[0, len(request.prompt_token_ids) - 1 : -1]
        logprobs = (logits / (request.temperature or 1.0)).log_softmax(-1)
        chosen = torch.tensor(sample.token_ids, dtype=torch.long)
        found.append(logprobs.gather(1, chosen[:, None])[:, 0].tolist())
    return found


@torch.no_grad()
def short_of_best(directory, requests, samples):
    """Return how far the logit of a sampled token was below the best one's, at most."""
    model, worst = reference_model(directory), 0.0
    for request, sample in zip(requests, samples, strict=True):
        ids = torch.tensor([[*request.prompt_token_ids, *sample.token_ids]])
        logits = model(ids).logits[0, len(request.prompt_token_ids) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(sample.token_ids, dtype=torch.long)[:, None])[:, 0]
        worst = max(worst, (logits.max(-1).values - chosen).max().item())
    return worst


def difference(ours, theirs):
    return torch.cat([(torch.tensor(a) - torch.tensor(b)).abs() for a, b in zip(ours, theirs, strict=True)])


def open_gloo(workers=1, bucket_bytes=100_000):
    sizes = {"workers_per_engine": workers, "bucket_bytes": bucket_bytes}
    return open_transport(TRANSPORTS["gloo"], WORLD, **sizes, timeout=TIMEOUT)


def connect(engine, source):
    transport = open_gloo()
    assert transport.connect(source, {0: engine}, [0]) == {}
    return transport


def update(transport, engine, source, version):
    order = UpdateOrder(version=version, sleeping=False, check=True, timeout=TIMEOUT)
    sent = update_engines(transport, WORLD, source, order, {0: engine}, [0])
    assert sent.failures == {}
    return sent


def left_out_unnoticed(engine, source, name_in_vllm=str):
    """Return the tensors whose absence no rehearsal noticed. vLLM joins several in one parameter."""
    metas, unnoticed = source.metadata(), []
    for absent in metas:
        brought = pickle.dumps([meta for meta in metas if meta is not absent])
        (answer,) = engine.call("rehearse_weight_update", brought, timeout=TIMEOUT)
        layer = name_in_vllm(absent.name).split("mlp")[0].split("_proj")[0].rpartition(".")[0]
        if not any(layer in name for name in pickle.loads(answer).forgotten):
            unnoticed.append(absent.name)
    return unnoticed
