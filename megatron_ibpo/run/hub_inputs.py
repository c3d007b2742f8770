"""Models and data of the Hub in a run's settings, replaced by local copies before any process starts."""

from dataclasses import replace

from megatron_ibpo.config import Config
from megatron_ibpo.config.paths import relocated
from megatron_ibpo.data.hub import local_model, local_source, pins_of


def with_local_copies(config: Config, *, data: bool = True) -> Config:
    """Return the configuration with local paths alone; what names the Hub is downloaded first.

    A resumed run gets the commits that it had. The paths have the commits in them, so the run's config.yaml
    records them. The driver downloads; on other nodes the same path must exist (docs/clusters.md).

    Args:
        data: False if only the model is needed.

    Raises:
        HubError: the Hub or its cache does not have it; says what to do.
    """
    load, model = config.run.load, config.model
    pins = pins_of([] if load is None else [load, *load.parents[:2]])
    plans = config.run.dry_run
    model = replace(
        model,
        hf_checkpoint=model.hf_checkpoint and local_model(model.hf_checkpoint, pins, weights=not plans),
        ref_load=model.ref_load and local_model(model.ref_load, pins, weights=not plans),
    )
    config = replace(config, model=model)
    if not data or plans:
        return config
    held_out = config.data.eval_prompt_data
    prompts = tuple(local_source(spec, pins) for spec in config.data.prompt_data)
    if held_out is not None:
        held_out = relocated(held_out, lambda spec: local_source(spec, pins))
    return replace(config, data=replace(config.data, prompt_data=prompts, eval_prompt_data=held_out))
