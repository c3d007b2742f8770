"""What instruments need that sample from one policy: an engine in its own process, without Ray and trainers,
and held-out prompts."""

from contextlib import ExitStack
from pathlib import Path

from megatron_ibpo.basics.records import Prompt
from megatron_ibpo.config import Config, as_specs, on_device
from megatron_ibpo.data import Tokenizer, open_source
from megatron_ibpo.engines import Engine
from megatron_ibpo.engines.registry import check_model
from megatron_ibpo.engines.vllm.settings import engine_settings, start_timeout
from megatron_ibpo.models import read_hf_config


def open_engine(config: Config, hf_dir: Path, stack: ExitStack) -> Engine:
    """Start an engine that keeps its initial weights."""
    import torch

    on_gpu = torch.cuda.is_available()
    shape = read_hf_config(hf_dir)
    rollout = on_device(config, on_gpu=on_gpu, has_delta_nets=shape.is_recurrent).rollout
    check_model(rollout, shape, on_gpu=on_gpu)
    engine = Engine(
        engine_settings(
            rollout,
            hf_dir,
            "nccl" if on_gpu else "gloo",
            gpus=tuple(range(rollout.rollout_num_gpus_per_engine)) if on_gpu else (),
            num_threads=torch.get_num_threads(),
        ),
        config.run.run_dir / "logs" / "engine.log",
    )
    stack.callback(engine.close)
    engine.wait_ready(start_timeout(rollout, hf_dir))
    return engine


def held_out_prompts(config: Config, tokenizer: Tokenizer, count: int) -> list[Prompt]:
    """Return the first held-out prompts of a recipe's task; its longest context must be resolved.

    Raises:
        ValueError: the recipe names no prompts.
    """
    data, rollout = config.data, config.rollout
    held_out = as_specs(data.eval_prompt_data)
    spec = held_out[0].spec if held_out else next(iter(data.prompt_data), None)
    if spec is None:
        raise ValueError("the recipe names no prompts: --prompt-data or --eval-prompt-data")
    assert rollout.rollout_max_context_len is not None
    room = rollout.rollout_max_context_len - rollout.rollout_max_response_len
    source = open_source(spec, tokenizer, data, split="eval", max_prompt_len=room, holds_out=not held_out)
    return source.batch(0, min(count, len(source) or count))
