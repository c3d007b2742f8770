"""Tracking of the segments that a recovery needs, and of what may be written next."""

from collections.abc import Callable
from dataclasses import dataclass, field

from megatron_ibpo.journal.entries import ClosedBatch, Entry, GroupId, Sampled, SampleKey, SegmentStart
from megatron_ibpo.journal.recovery import settle


@dataclass
class Index:
    """Locations of the records needed to resume from the checkpoint of step `saved`."""

    saved: int
    last_step: int
    """Number of the last batch that the journal knows to be closed."""
    _open: dict[GroupId, dict[SampleKey, int]] = field(default_factory=dict)
    """Segment of every sample that no batch has taken or dropped."""
    _batches: dict[int, int] = field(default_factory=dict)
    """Step → the first segment that its replay needs, for batches after the saved step."""
    _settled: dict[GroupId, int] = field(default_factory=dict)
    """Group that one of these batches took or dropped → the batch's step."""

    def needed_from(self, present: int, rewound: int | None = None) -> int:
        """Return the first segment that a recovery needs; `present` if it needs no earlier one.

        Args:
            rewound: compute as if the journal had been rewound to this step.
        """
        if rewound is not None:
            return min([present, *(segment for step, segment in self._batches.items() if step <= rewound)])
        samples = (segment for group in self._open.values() for segment in group.values())
        return min([present, *samples, *self._batches.values()])

    def take(self, segment: int, entry: Entry) -> None:
        """Note an entry of this segment."""
        match entry:
            case Sampled(key):
                self._open.setdefault(key.group, {})[key] = segment
            case ClosedBatch(step):
                samples = settle(self._open, entry)
                self._forget(lambda own: own >= step)  # in case the record of a rewind is lost
                self.last_step = step
                if step > self.saved:
                    self._batches[step] = min([segment, *samples.values()])
                    self._settled |= dict.fromkeys(entry.settled, step)
            case SegmentStart(last_step=last_step, rewound=None):
                self.last_step = max(self.last_step, last_step)
            case SegmentStart(rewound=int(step)):
                self._open.clear()
                self._forget(lambda own: own > step)
                self.last_step = step

    def save(self, step: int) -> None:
        """Note that the checkpoint of this step is complete: nothing up to it needs to be replayed."""
        self.saved = step
        self._forget(lambda own: own <= step)

    def check_sample(self, key: SampleKey) -> None:
        """Raise ValueError for a sample that the journal has, or whose group is settled."""
        if key in self._open.get(key.group, {}):
            raise ValueError(f"{key} is in the journal already")
        if (step := self._settled.get(key.group)) is not None:
            raise ValueError(f"{key}: the batch of step {step} has closed or dropped its group")

    def check_batch(self, batch: ClosedBatch) -> None:
        """Raise ValueError for a batch out of turn, or one that does not name all samples of its groups."""
        if batch.step != self.last_step + 1:
            raise ValueError(
                f"a batch of step {batch.step} cannot follow step {self.last_step}; a run that resumes "
                "from an earlier step must rewind its journal first"
            )
        for group in batch.groups:
            named, known = set(group.sample_keys()), set(self._open.get(group.id, {}))
            if named != known:
                raise ValueError(
                    f"the batch of step {batch.step} names other samples of prompt {group.prompt_index} "
                    f"(attempt {group.attempt}) than the journal has: {len(named - known)} are missing, "
                    f"{len(known - named)} too many"
                )

    def _forget(self, chosen: Callable[[int], bool]) -> None:
        """Forget the batches of the chosen steps."""
        self._batches = {own: segment for own, segment in self._batches.items() if not chosen(own)}
        self._settled = {group: own for group, own in self._settled.items() if not chosen(own)}
