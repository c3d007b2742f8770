"""Metrics of sampling, for the report."""


class Meter:
    """Counts requests, samples and deaths. Times are the event loop's, in seconds."""

    def __init__(self, num_engines: int) -> None:
        self._num_engines = num_engines
        self._reset()

    def _reset(self) -> None:
        self._requests = [0] * self._num_engines
        self._first: float | None = None
        self._last = 0.0
        self._asked_again = self._deaths = 0

    def requested(self, engine: int) -> None:
        self._requests[engine] += 1

    def finished(self, time: float) -> None:
        self._first = time if self._first is None else self._first
        self._last = time

    def died(self, unfinished: int) -> None:
        self._deaths += 1
        self._asked_again += unfinished

    def take(self) -> dict[str, float]:
        """Return, since the last call: most and fewest requests of an engine, engines that died, requests
        repeated for that reason, and the seconds from the first sample to the last."""
        metrics = {
            "engine_requests_max": float(max(self._requests)),
            "engine_requests_min": float(min(self._requests)),
            "engine_deaths": float(self._deaths),
            "requests_asked_again": float(self._asked_again),
            "sampling_tail_seconds": 0.0 if self._first is None else self._last - self._first,
        }
        self._reset()
        return metrics
