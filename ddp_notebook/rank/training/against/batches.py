"""Records this rank's batches, or replaces them by other ranks' joined batches."""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import BatchSampler

from ddp_notebook.model.against.trail import Loading


class Batches:
    """The batches that the batch samplers of this process yield.

    With `feed`, the batches of several ranks, each batch is those of the ranks joined; samplers
    correspond to each other by the order in which they were made. `turned`: the last rank's
    samples come first. If the ranks had other data than this process, each a part of it, a batch
    has as many samples as theirs together, in this sampler's own order.
    """

    def __init__(self, feed: Sequence[Sequence[Loading]] = (), *, turned: bool = False) -> None:
        self._feed = feed
        self._turned = turned
        self._samplers: list[Any] = []
        self._lengths: list[int | None] = []
        self._samples: list[int | None] = []
        self._given: list[list[list[tuple[int, ...]]]] = []

    def attach(self) -> None:
        """Record, or feed, each batch sampler that is made from now on."""
        make, iterate, length = BatchSampler.__init__, BatchSampler.__iter__, BatchSampler.__len__
        batches = self

        @functools.wraps(make)
        def made(self: Any, *args: Any, **named: Any) -> None:
            make(self, *args, **named)
            batches._add(self, length)

        @functools.wraps(iterate)
        def iterated(self: Any) -> Iterator[list[int]]:
            return batches._iterate(self, iterate(self))

        @functools.wraps(length)
        def counted(self: Any) -> int:
            own = int(length(self))
            fed = batches._fed_length(self)
            return own if fed is None else fed

        BatchSampler.__init__ = made  # type: ignore[method-assign]
        BatchSampler.__iter__ = iterated  # type: ignore[method-assign]
        BatchSampler.__len__ = counted  # type: ignore[method-assign]

    def loadings(self) -> tuple[Loading, ...]:
        """The batches so far, by sampler in the order in which they were made."""
        return tuple(
            Loading(tuple(tuple(given) for given in iterations), length, samples)
            for iterations, length, samples in zip(
                self._given, self._lengths, self._samples, strict=True
            )
        )

    def _add(self, sampler: Any, length: Any) -> None:
        self._samplers.append(sampler)
        self._given.append([])
        self._lengths.append(None)
        self._samples.append(None)
        indices = getattr(sampler, "sampler", None)
        data = getattr(indices, "dataset", getattr(indices, "data_source", None))
        with contextlib.suppress(Exception):  # a sampler of the user's that cannot tell
            self._lengths[-1] = int(length(sampler))
            self._samples[-1] = len(data) if data is not None else None

    def _number(self, sampler: Any) -> int | None:
        return next((n for n, known in enumerate(self._samplers) if known is sampler), None)

    def _of_ranks(self, number: int) -> list[Loading]:
        return [rank[number] for rank in self._feed if number < len(rank)]

    def _fed_length(self, sampler: Any) -> int | None:
        number = self._number(sampler)
        if number is None:
            return None
        return max((of.length or 0 for of in self._of_ranks(number)), default=0) or None

    def _iterate(self, sampler: Any, own: Iterator[list[int]]) -> Iterator[list[int]]:
        number = self._number(sampler)
        if number is None:
            yield from own
            return
        given: list[tuple[int, ...]] = []
        again = len(self._given[number])
        self._given[number].append(given)
        indices = True
        for batch in self._fed(number, again, own):
            if indices:
                try:
                    given.append(tuple(map(operator.index, batch)))
                except TypeError:  # not indices, but something of the user's: not to be fed
                    indices = False
                    given.clear()
            yield batch

    def _fed(self, number: int, again: int, own: Iterator[list[int]]) -> Iterator[list[int]]:
        """The batches of a sampler's iteration number `again`: its own, or the ranks' joined."""
        ranks = self._of_ranks(number)
        fed = [of.iterations[again] for of in ranks if again < len(of.iterations)]
        if not any(fed):
            return own
        if any(of.samples != self._samples[number] for of in ranks):
            return self._by_size(fed, own)
        next(own, None)  # the sampler's random numbers are still drawn
        fed = fed[::-1] if self._turned else fed
        return (_joined(fed, k) for k in range(max(map(len, fed))))

    def _by_size(
        self, fed: Sequence[Sequence[tuple[int, ...]]], own: Iterator[list[int]]
    ) -> Iterator[list[int]]:
        indices = itertools.chain.from_iterable(own)
        for k in range(max(map(len, fed))):
            batch = list(itertools.islice(indices, len(_joined(fed, k))))
            if not batch:
                return
            yield batch[::-1] if self._turned else batch


def _joined(fed: Sequence[Sequence[tuple[int, ...]]], k: int) -> list[int]:
    return [index for batches in fed if k < len(batches) for index in batches[k]]
