"""An engine in a process of its own, without Ray and trainers, for instruments that ask one policy."""

from contextlib import ExitStack
from pathlib import Path

from megatron_ibpo.config import Config
from megatron_ibpo.rollout import Engine
from megatron_ibpo.rollout.settings import engine_settings, start_timeout


def open_engine(config: Config, hf_dir: Path, stack: ExitStack) -> Engine:
    """An engine that keeps the weights it starts with."""
    import torch

    rollout, on_gpu = config.rollout, torch.cuda.is_available()
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
