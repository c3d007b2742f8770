"""Train a policy on demonstrations (supervised fine-tuning), as a warm start for RL.

    bash tools/ibpo.sh sft --hf-checkpoint MODEL --prompt-data rows.jsonl --apply-chat-template FLAGS…

Rows are chats, {"messages": […]}, or {"prompt": …, "response": …}. Only what the assistant says is in the
loss. The flags are those of `train`: --rollout-batch-size is the number of rows per step, --num-rollout the
number of steps, --eval-prompt-data names held-out rows.
"""

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

from megatron_ibpo.basics.entry_point import DONE, INTERRUPTED, command, guarded
from megatron_ibpo.config import Config
from megatron_ibpo.data.hub import prepare_upload, upload_export, with_local_copies
from megatron_ibpo.run.settings import check_installed, parse_config
from megatron_ibpo.run.stop_request import StopRequest

FLAGS = (
    "hf_checkpoint", "prompt_data", "eval_prompt_data", "input_key", "label_key", "apply_chat_template", "lr",
    "rollout_batch_size", "num_rollout", "num_epoch", "rollout_max_context_len", "max_tokens_per_gpu",
    "num_trainers", "tensor_model_parallel_size", "pipeline_model_parallel_size",
    "expert_model_parallel_size", "context_parallel_size", "run_dir", "load", "save_interval",
    "eval_interval", "eval_num_prompts", "seed",
)  # fmt: skip
"""Fields that --help shows."""
DEFAULTS = {"label_key": "response", "lr": 1e-5}
"""Defaults of this command. lr: usual for supervised fine-tuning; RL's is far smaller."""
UNUSED = {
    "rollout_max_response_len": "--rollout-max-response-len: has no effect here; rows are limited by "
    "--rollout-max-context-len alone"
}


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Train as the flags say. Return the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    config = parse_config(
        words, program="ibpo sft", description=str(__doc__), common=FLAGS, defaults=DEFAULTS, unused=UNUSED
    )
    check_installed()
    from megatron_ibpo.run.supervised import supervised  # late, so that wrong flags are reported at once

    supervised(config)  # refuses what cannot work before anything is downloaded
    prepare_upload(config.run)
    config = with_local_copies(config)
    stop = StopRequest(config.run.run_dir / "hangup.log")
    return guarded(
        lambda: fine_tune(config, stop), logs=config.run.run_dir / "logs", stopped="stopped at once"
    )


def fine_tune(config: Config, stop: StopRequest) -> int:
    """Run the whole training."""
    from megatron_ibpo.run.supervised import open_supervised  # late, as above

    with ExitStack() as stack:
        run = stop.cuts_short(partial(stack.enter_context, open_supervised(config)))
        if run is None:
            return INTERRUPTED
        stop.cuts_short(run.evaluate_if_due)
        while not (run.done() or stop.requested):
            run.update()
            run.save_if_due()
            stop.cuts_short(run.evaluate_if_due)
        run.finish("interrupted" if stop.requested else "finished")
    upload_export(config.run, stopped=stop.requested)
    return INTERRUPTED if stop.requested else DONE


if __name__ == "__main__":
    sys.exit(main())
