"""A job on other hosts, as what `why`, `where` and the board look at: each host is asked anew."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from typing import Any

from ddp_notebook.archive.format import Observed, SavedRun
from ddp_notebook.archive.replay import Replay
from ddp_notebook.errors import UsageMistake
from ddp_notebook.jobs import picture, prepared
from ddp_notebook.jobs.hosts.commands import Host, last_line, on_all
from ddp_notebook.jobs.hosts.joined import diagnosed, joined, judged, observed
from ddp_notebook.jobs.verdict import Verdict
from ddp_notebook.model import (
    Board,
    Case,
    Place,
    Ranks,
    RankStack,
    StackTree,
    codec,
    format_ranks,
)
from ddp_notebook.model.codec import DecodeError
from ddp_notebook.state import stack_tree
from ddp_notebook.views.ansi import plain


class Elsewhere:
    """The ranks of one job on other hosts: with each host, what the job is called there.

    It is asked at once. Raises UsageMistake where no host knows of the job, as every question does.
    """

    def __init__(self, hosts: Sequence[tuple[Host, str]]) -> None:
        self._hosts = [host for host, _ in hosts]
        self._words = [word for _, word in hosts]
        self._missing: tuple[str, ...] = ()
        self._names: dict[str, str] = {}
        self._runs: dict[str, SavedRun] = {}
        self._look()

    @property
    def name(self) -> str:
        """Its pid, as it was given, its script, and the hosts."""
        return plain(", ".join(f"{name} on {host}" for host, name in self._names.items()))

    @property
    def about(self) -> str:
        """Its ranks, and whether they run, when it was last asked."""
        if len(self._runs) == 1:
            (run,) = self._runs.values()
            return plain(observed(run).about)
        parts = [f"{host}: {plain(observed(run).about)}" for host, run in self._runs.items()]
        return "; ".join(parts)

    @property
    def world_size(self) -> int:
        """As the ranks were told."""
        return max(run.world_size for run in self._runs.values())

    def why(self) -> Verdict:
        """What is wrong with it; on several hosts, what is so in two looks at all of them."""
        diagnosis = diagnosed(self._look())
        if diagnosis.wrong and len(self._runs) > 1:  # of one host, it has looked twice itself
            diagnosis = prepared.in_both(diagnosis, diagnosed(self._look()))
        judgement = judged(diagnosis, self._runs)
        return replace(judgement, unread=(*judgement.unread, *self._notes()))

    def where(self, ranks: Ranks | None = None, locals: bool = False) -> StackTree:
        """The stacks of `ranks`, as the hosts show them."""
        options = ["--json", "--stacks", *(["--locals"] if locals else [])]
        options += [] if ranks is None else ["--ranks", format_ranks(ranks)]
        stacks: dict[int, RankStack] = {}
        for host, output in self._answers("where", *options).items():
            run = self._runs.get(host)
            there = None if run is None or len(self._hosts) == 1 else observed(run).ranks
            found = _stacks(host, output)
            stacks |= {stack.rank: stack for stack in found if there is None or stack.rank in there}
        return stack_tree.merge(stacks.values(), self.world_size)

    def places(self) -> Mapping[int, tuple[Place, ...]]:
        """The lines of `where`."""
        return {report.rank: report.path for report in self._case().ranks if report.path}

    def board(self) -> Board:
        """What the hosts know of each rank."""
        diagnosis = self.why().diagnosis
        return picture.board(
            joined(self._runs), f"{self.name}: {self.about}", diagnosis, self._over
        )

    def saved(self) -> SavedRun:
        """What the hosts know, as one run."""
        found = self.why()
        ranks = tuple(rank for run in self._runs.values() for rank in observed(run).ranks)
        seen = Observed(self.name, self.about, ranks=ranks)
        return picture.saved(joined(self._runs), found, self._over, seen)

    # -- how they are asked ----------------------------------------------------------------------

    @property
    def _over(self) -> bool:
        return all(run.snapshot.ended for run in self._runs.values())

    def _case(self) -> Case:
        return joined(self._look())

    def _look(self) -> dict[str, SavedRun]:
        """What each host knows now."""
        runs = {host: _run(host, out) for host, out in self._answers("save", "-").items()}
        for host, run in runs.items():
            name = observed(run).name
            if self._names.setdefault(host, name) != name:
                raise UsageMistake(f"{self.name} is no more: there it is {plain(name)} now.")
        self._runs = runs
        return runs

    def _answers(self, command: str, *options: str) -> dict[str, bytes]:
        """What each host prints; `_missing` says which do not, and why."""
        words = [(command, word, *options) for word in self._words]
        answers = on_all(self._hosts, words)
        wrong = [answer for answer in answers if isinstance(answer, UsageMistake)]
        if len(wrong) == len(answers):
            raise wrong[0]
        self._missing = tuple(map(str, wrong))
        pairs = zip(self._hosts, answers, strict=True)
        return {host.name: out for host, out in pairs if isinstance(out, bytes)}

    def _notes(self) -> list[str]:
        """Which hosts were not heard, and which have another version."""
        here = metadata.version("ddp-notebook")
        versions = {host: run.versions.get("ddp_notebook") for host, run in self._runs.items()}
        return [
            *self._missing,
            *(
                f"{host} has ddp_notebook {plain(there)}, this host has {here}: what is said of "
                "the job may differ"
                for host, there in versions.items()
                if there and there != here
            ),
        ]


def _run(host: str, output: bytes) -> SavedRun:
    """Raises UsageMistake where that is no run, or one of a newer version."""
    return Replay.of_text(last_line(output), f"what {host} answers").saved


def _stacks(host: str, output: bytes) -> tuple[RankStack, ...]:
    try:
        wire: Any = json.loads(output[output.find(b"{") :])
        stacks: tuple[RankStack, ...] = codec.decode(
            tuple[RankStack, ...], codec.readable(wire.get("stacks"))
        )
    except (DecodeError, ValueError, AttributeError, RecursionError) as error:
        raise UsageMistake(f"What {host} answers cannot be read: {error}.") from None
    return stacks
