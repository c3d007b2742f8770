"""Opens trainers on a rank and reads gradients off a first step, in which Adam's epsilon is huge."""

from pathlib import Path

from megatron_ibpo.config import Config, LossConfig, ModelConfig, OptimizerConfig
from support import planned
from support.layouts import layout

EPSILON, LR = 10.0, 1.0
ROUNDING = 2**-22 * EPSILON / LR  # of a gradient read off the change of a float32 weight of up to 2 in size


def config_for(parallel, *, lr=LR, eps_adam=EPSILON, max_tokens=200, log_probs_tokens=None, **loss):
    model = ModelConfig(max_tokens_per_gpu=max_tokens, log_probs_max_tokens_per_gpu=log_probs_tokens)
    steady = {"lr_decay_style": "constant", "lr_warmup_fraction": 0, "clip_grad": 1e9}
    optimizer = OptimizerConfig(lr=lr, adam_eps=eps_adam, **steady)
    loss = LossConfig(**{"eps_clip": 0.2, "eps_clip_high": 0.2, **loss})
    return Config(model=model, parallel=parallel, optimizer=optimizer, loss=loss)


def built(world, hf_dir, config, *, value=False, **how):
    """Start Megatron's groups; return this rank's part of a policy, or of a `value` model, and its shape."""
    from megatron_ibpo.models import read_hf_config
    from megatron_ibpo.policy import parallel
    from megatron_ibpo.policy.model import build_model, build_value_model
    from megatron_ibpo.weights.formats.hf_models import load_hf

    shape = read_hf_config(Path(hf_dir))
    parallel.initialize(config.parallel, world, seed=0)
    chunks = (build_value_model if value else build_model)(shape, config, **how)
    load_hf(chunks, shape, Path(hf_dir), head=not value)
    return chunks, shape


def open_trainer(world, hf_dir, config, reference=None):
    from megatron_ibpo.models.backends import LOCAL
    from megatron_ibpo.policy.mtp import build_mtp
    from megatron_ibpo.policy.residence import load_reference
    from megatron_ibpo.policy.trainer import Trainer
    from megatron_ibpo.weights.formats.hf_models import load_mtp
    from megatron_ibpo.weights.layout.export import HFExport

    (chunks, shape), mtp = built(world, hf_dir, config), None
    if config.model.mtp_num_layers:
        mtp = build_mtp(shape, config, device="cpu", libraries=LOCAL)
        load_mtp(mtp, chunks, shape, Path(hf_dir))
    held = None if reference is None else load_reference(chunks, shape, reference)
    trainer = Trainer(chunks, shape.vocab_size, config, world, total_updates=10, reference=held, mtp=mtp)
    return trainer, HFExport(chunks, shape, mtp=mtp), shape


def close_trainer():
    from megatron_ibpo.policy import parallel

    parallel.destroy()


def weights_of(export):
    """Return copies by name on the first rank, which alone is given them, and nothing elsewhere."""
    return {name: tensor.clone() for name, tensor in export if tensor is not None}


def one_update(world, hf_dir, config, rows, then=lambda trainer: None):
    trainer, export, _ = open_trainer(world, hf_dir, config)
    before = weights_of(export)
    metrics = planned.update(trainer, rows)
    after = weights_of(export)
    then(trainer)
    close_trainer()
    return before, after, metrics


def gradients(world, cases, rows, **loss):
    """Return, for each (checkpoint, layout, loss settings if any), gradients by name (rank 0) and metrics."""
    results = []
    for hf_dir, parallel, *settings in cases:
        config = config_for(parallel, **loss, **dict(*settings))
        before, after, metrics = one_update(world, hf_dir, config, rows)
        results.append((moved(before, after), metrics))
    return results


def moved(before, after):
    return {name: (before[name] - after[name]) * (EPSILON / LR) for name in before}


def replaying(parallel=None, *, rollout=True, own=False, recompute="none", overrides=(), **settings):
    config = config_for(parallel or layout(), use_routing_replay=own, **settings)
    config.rollout.use_rollout_routing_replay = rollout
    config.model.recompute_granularity = recompute
    config.model.model_override = tuple(overrides)
    return config


def updated(world, hf_dir, config, rows):
    """Return metrics, gradients by name (rank 0) and log-probs after the update."""
    found: list = []
    before, after, metrics = one_update(
        world, hf_dir, config, rows, lambda trainer: found.extend(planned.logprobs(trainer, rows))
    )
    return metrics, moved(before, after), found


def all_updated(world, hf_dir, configs, rows):
    return [updated(world, hf_dir, config, rows) for config in configs]


COMPARED = (
    *("loss", "grad_norm", "entropy", "ratio_mean", "clip_fraction", "logprob_diff_abs_mean"),
    *(f"importance_{name}" for name in ("weight_mean", "token_cut_fraction", "sequence_cut_fraction")),
)


def assert_close(found, expected, *case):
    """Compare each tensor by its own largest number: another's would hide one whose gradients are small."""
    assert found.keys() == expected.keys()
    for name, wanted in expected.items():
        worst, scale = (found[name] - wanted).abs().max().item(), wanted.abs().max().item()
        assert scale > 100 * ROUNDING, (*case, name, scale, "would not be tested")
        assert worst <= 2e-4 * scale + ROUNDING, (*case, name, worst, scale)
