"""Display of a run on the terminal: its named sizes, each with its meaning, and the progress of the steps."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megatron_ibpo.basics.text import counted
from megatron_ibpo.config import Config, named_values
from megatron_ibpo.engines.registry import samples_in_trainer, sampling_precision

METRIC_LABELS = {
    "reward": "reward",
    "accuracy": "accuracy",
    "correction_success": "corrected",
    "loss": "loss",
    "clip_fraction": "clipped",
    "logprob_diff_abs_mean": "|Δ log-prob|",
}
"""Metrics of the live display → their labels there."""


@dataclass(frozen=True)
class Size:
    """One line of the table of sizes."""

    name: str
    value: str | int
    meaning: str = ""


def plain_table(texts: Sequence[str], numbers: Sequence[str]) -> Table:
    """Return a table without edges, with these columns of text and then these of numbers."""
    table = Table(*texts, show_edge=False, pad_edge=False)
    for column in numbers:
        table.add_column(column, justify="right")
    return table


def sizes_table(sizes: Iterable[Size]) -> Table:
    """Return a table with the named sizes of a run, one per line."""
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("size", no_wrap=True)
    table.add_column("value", justify="right")
    table.add_column("what it is", style="dim")
    for size in sizes:
        value = f"{size.value:,}" if isinstance(size.value, int) else size.value
        table.add_row(size.name, value, size.meaning)
    return table


def open_console() -> Console:
    """Open the terminal as it is; a file or pipe gets lines wide enough for the tables."""
    console = Console()
    return console if console.is_terminal else Console(width=120)


class ProgressDisplay:
    """A live panel on a terminal; one plain line per step on any other output."""

    def __init__(self, num_steps: int, *, completed_steps: int = 0, console: Console | None = None):
        self.console = console or open_console()
        self._num_steps = num_steps
        self._first_step = self._step = completed_steps
        self._start = time.monotonic()
        self._live: Live | None = None

    def print(self, content: object) -> None:
        """Print above the live panel."""
        self.console.print(content, highlight=False, markup=False, soft_wrap=isinstance(content, str))

    def step(self, step: int, metrics: Mapping[str, float], seconds: Mapping[str, float]) -> None:
        if self._step == self._first_step:
            self._start = time.monotonic() - sum(seconds.values())  # start-up is not part of the estimate
        self._step = step
        values = "  ".join(f"{label} {metrics[k]:.4g}" for k, label in METRIC_LABELS.items() if k in metrics)
        sampling = "  ".join(_sampling(metrics))
        total, stages = sum(seconds.values()), _stages(seconds)
        per_step = (time.monotonic() - self._start) / max(1, step - self._first_step)
        eta = _clock(per_step * (self._num_steps - step))
        if not self.console.is_terminal:
            words = [f"step {step}/{self._num_steps}", values, sampling]
            words += [f"{total:.1f} s ({stages})", f"eta {eta}"]
            self.print("  ".join(filter(None, words)))
            return
        if self._live is None:
            self._live = Live(console=self.console, auto_refresh=False)
            self._live.start()
        bar = ProgressBar(total=self._num_steps, completed=step)
        lines = [values, sampling, f"{total:.1f} s per step: {stages}"]
        title = f"step {step} of {self._num_steps}, {eta} to go"
        panel = Panel(Group(bar, *map(Text, filter(None, lines))), title=title, title_align="left")
        self._live.update(panel, refresh=True)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def _sampling(metrics: Mapping[str, float]) -> list[str]:
    """Return the number of live engines and, if sampling runs ahead, the age of the batch and its work."""
    parts = []
    if "engines" in metrics:
        parts.append(f"engines {metrics['engines_alive']:.0f}/{metrics['engines']:.0f}")
    if "staleness_max" in metrics:
        parts.append(f"staleness {metrics['staleness_mean']:.2g}, at most {metrics['staleness_max']:.0f}")
        in_flight = f"in flight {counted(round(metrics['samples_in_flight']), 'sample')}"
        parts.append(f"{in_flight} of {counted(round(metrics['groups_in_flight']), 'group')}")
        parts.append(f"buffer {counted(round(metrics['groups_buffered']), 'group')}")
    return parts


def _stages(seconds: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.2f}" for name, value in seconds.items() if value >= 0.005)


def _clock(seconds: float) -> str:
    minutes, full_seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{full_seconds:02d}" if hours else f"{minutes}:{full_seconds:02d}"


PROGRAM = "megatron_ibpo"


class _ConsoleHandler(logging.Handler):
    def __init__(self, show: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self.setFormatter(logging.Formatter("%(asctime)s  %(message)s", "%H:%M:%S"))
        self._show = show

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._show(self.format(record))
        except Exception:
            self.handleError(record)


@contextmanager
def warnings_shown(show: Callable[[str], None]) -> Iterator[None]:
    """Pass every warning of the program to `show`, from any thread, with the time of day.

    Otherwise Python would print them to stderr, without the time and beside the display.
    """
    handler = _ConsoleHandler(show)
    logger = logging.getLogger(PROGRAM)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


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
    computed_by = loss_backend or loss.loss_backend
    head = ", LM head fused, --fuse-lm-head" if loss.fuse_lm_head else ""
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
        Size("loss", loss.loss_variant, f"computed by {computed_by}, --loss-backend{head}"),
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
