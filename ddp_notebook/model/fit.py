"""How the time of a message depends on its size: a latency and a bandwidth."""

from __future__ import annotations

from dataclasses import dataclass

Interval = tuple[float, float]
"""The ends of a 95 % interval, lower one first. An end may be infinite."""


@dataclass(frozen=True, slots=True)
class Regime:
    """Sizes from `from_bytes` on take ``latency_s + size * s_per_byte`` seconds."""

    from_bytes: int
    latency_s: float
    s_per_byte: float


@dataclass(frozen=True, slots=True)
class Fit:
    """The time of a message of any size, as one straight line, or two that take turns.

    `latency_s` is what even the smallest message takes: the first line's start.
    `bandwidth_bytes_per_s` is what the largest come near to: the slope of the last line.
    `half_bandwidth_bytes` is the smallest size that gets half of that bandwidth. Each has its
    95 % interval beside it. Made by `ddp_notebook.bench.fit.fit`.
    """

    regimes: tuple[Regime, ...]
    latency_s: float
    latency_interval_s: Interval
    bandwidth_bytes_per_s: float
    bandwidth_interval_bytes_per_s: Interval
    half_bandwidth_bytes: float
    half_bandwidth_interval_bytes: Interval
    from_bytes: int
    """The smallest size it was fitted to."""
    to_bytes: int
    """The largest."""
    median_error: float
    """Half of the sizes it was fitted to are off by at most this share of their time."""
    max_error: float
    """None of them is off by more."""

    def predict(self, size_bytes: float) -> float:
        """Seconds that a message of `size_bytes` takes, by the model.

        Beyond `from_bytes` and `to_bytes` nothing was measured: there it is a guess.
        """
        regime = self.regimes[0]
        for each in self.regimes[1:]:
            if size_bytes >= each.from_bytes:
                regime = each
        return regime.latency_s + size_bytes * regime.s_per_byte
