"""The named sizes of a run: few, each with its meaning."""

from collections.abc import Mapping

from megatron_ibpo.basics.text import counted
from megatron_ibpo.config import Config, LossConfig, named_values
from megatron_ibpo.engines.registry import samples_in_trainer, sampling_precision
from megatron_ibpo.report.display import Size


def run_sizes(
    config: Config,
    world_size: int,
    *,
    corrections: int,
    parameters: int | None = None,
    engines: int | None = None,
    loss_backend: str | None = None,
    layers: Mapping[str, tuple[str, str]] | None = None,
) -> list[Size]:
    """Return the named sizes of a step, and those of model and engines if known.

    corrections: most corrections per response.
    loss_backend: back end that computes the loss and why, once known.
    layers: part of a layer → (the library that computes it, how), for the known parts.
    """
    rollout, loss, parallel = config.rollout, config.loss, config.parallel
    num_prompts, group_size = rollout.rollout_batch_size, rollout.n_samples_per_prompt
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    cp = parallel.context_parallel_size
    shared, packed = (f" CP{cp}", f" x CP {cp}, packed") if cp > 1 else ("", ", packed")
    sizes = [
        Size("prompts per step (P)", num_prompts, "--rollout-batch-size"),
        Size("responses per prompt (G)", group_size, "--n-samples-per-prompt"),
        Size("responses per step", num_prompts * group_size, "P x G, each of weight 1/(P x G)"),
        Size(
            "corrections per step",
            f"≤ {num_prompts * group_size * corrections:,}",
            "--ibpo-corrections for each wrong response",
        ),
        Size(
            "updates per step",
            loss.updates_per_rollout,
            f"optimizer steps, of {counted(num_prompts // loss.num_steps_per_rollout, 'prompt')} each",
        ),
        Size("epochs per step", loss.num_epochs_per_rollout, "passes over the responses of a step"),
        Size("response tokens", f"≤ {rollout.rollout_max_response_len:,}", "--rollout-max-response-len"),
        Size("context tokens", f"≤ {rollout.rollout_max_context_len or 0:,}", "prompt and response together"),
        Size("tokens per micro-batch", cp * config.model.max_tokens_per_gpu, f"--max-tokens-per-gpu{packed}"),
        Size(
            "without a gradient",
            cp * config.model.tokens_without_gradient,
            f"--log-probs-max-tokens-per-gpu{packed}",
        ),
        Size("steps", config.run.num_rollout, "--num-rollout"),
        Size("budget", f"{config.run.budget or 0:g}", f"{config.run.budget_unit}; the run stops when spent"),
        Size(
            "layout",
            f"TP{tp} EP{parallel.expert_model_parallel_size} PP{pp}{shared} DP{world_size // (tp * pp * cp)}",
            f"of {counted(world_size, 'rank')}",
        ),
        Size("precision", "bfloat16" if config.model.bf16 else "float32", "of the trainer, --bf16"),
        *(Size(part, library, implementation) for part, (library, implementation) in (layers or {}).items()),
        Size("loss", loss.loss_variant, _computed_by(loss, loss_backend)),
    ]
    overrides = {"--model-override": config.model.model_override}
    overrides["--optimizer-override"] = config.optimizer.optimizer_override
    for flag, settings in overrides.items():
        sizes += [Size(name, value, flag) for name, value in named_values(settings).items()]
    if parameters is not None:
        sizes.append(Size("parameters", parameters, "of the whole model"))
    if engines is not None:
        per_engine = rollout.rollout_num_gpus_per_engine
        backend = rollout.rollout_backend
        engine = f"{backend}, TP{per_engine}, {sampling_precision(rollout).dtype}"
        in_trainer = f"--rollout-backend {backend}: the trainer's own process, float32"
        sizes.append(Size("engines", engines, in_trainer if samples_in_trainer(backend) else engine))
    unused = set() if corrections else {"corrections per step"}
    unused |= {"epochs per step"} if loss.num_epochs_per_rollout == 1 else set()
    unused |= {"budget"} if config.run.budget is None else set()
    unused |= {"without a gradient"} if config.model.log_probs_max_tokens_per_gpu is None else set()
    return [size for size in sizes if size.name not in unused]


def _computed_by(loss: LossConfig, backend: str | None) -> str:
    head = ", LM head fused, --fuse-lm-head" if loss.fuse_lm_head else ""
    return f"computed by {backend or loss.loss_backend}, --loss-backend{head}"
