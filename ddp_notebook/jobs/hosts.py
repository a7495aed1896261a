"""Jobs on other hosts, seen by `ddp-notebook` there: by the user's ssh, or Slurm's srun.

Nothing listens anywhere for it, and nothing is sent but the command that is run there, which only
looks. Its output is read to a bound and within a time limit; what is not as expected is said in
words, with what the other program said. The observations of several hosts are joined: each rank as
its own host knows it.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from ddp_notebook.archive.format import Observed, SavedRun
from ddp_notebook.archive.replay import LARGEST_FILE, Replay
from ddp_notebook.errors import UsageMistake
from ddp_notebook.jobs import prepared
from ddp_notebook.jobs.target import ELSEWHERE, OF_SLURM, Target, is_elsewhere, on_this_host
from ddp_notebook.jobs.verdict import Verdict, for_others
from ddp_notebook.launch.placement import HOST_NAME
from ddp_notebook.launch.ssh_hosts import ssh_command
from ddp_notebook.model import (
    Activity,
    Case,
    Collective,
    Collectives,
    Diagnosis,
    RankReport,
    Ranks,
    RankStack,
    StackTree,
    codec,
    cut,
    format_ranks,
    name_ranks,
    verb,
)
from ddp_notebook.model.codec import DecodeError
from ddp_notebook.views import stack_tree
from ddp_notebook.views.ansi import plain, preformatted

# -- commands that are run there -------------------------------------------------------------

THERE_VARIABLE = "DDP_NOTEBOOK_THERE"
"""Where `ddp-notebook` is on the other hosts."""
_WITHIN_S = 60.0
_RUN_THERE = 'if [ -x "$0" ]; then exec "$0" "$@"; fi; exec ddp-notebook "$@"'
"""The script of the shell there; it prefers the file of here, as hosts may share a file system."""


@dataclass(frozen=True, slots=True)
class Host:
    """Another host. `reached` are the words before a command that is to run there.

    `joins`: what runs them there hands one text to a shell, as ssh does.
    """

    name: str
    reached: tuple[str, ...]
    by_hand: str
    """The command that a user can try in a shell."""
    joins: bool = False

    def run(self, words: Sequence[str]) -> bytes:
        """Return what `ddp-notebook` with these words prints there, when it ends with code 0.

        Raises UsageMistake.
        """
        there = os.environ.get(THERE_VARIABLE) or str(Path(sys.executable).with_name(_NAME))
        command = ("sh", "-c", _RUN_THERE, there, *words)
        call = (*self.reached, *((shlex.join(command),) if self.joins else command))
        program = self.reached[0]
        if shutil.which(program) is None:
            raise UsageMistake(
                f"{plain(self.name)} cannot be asked: {program} is not installed here."
            )
        code, output, errors = _output(call)
        if code == 0:
            return output
        raise UsageMistake(self._why(code, errors, words, there))

    def _why(self, code: int | None, last: str, words: Sequence[str], there: str) -> str:
        """Say why there is no output; `last` is the last line of error output."""
        name, try_it = self.name, f"Try it in a shell: {plain(self.by_hand)}"
        if code is None:
            said = f" Its last words: {last}" if last else ""
            return f"{name} gave no answer within {_WITHIN_S:.0f} s.{said} {try_it}"
        # 255 is ssh's own; of srun, it is what the command there has ended with.
        if code == 255 and self.joins:
            said = last or "nothing"
            return (
                f"{name} cannot be reached, and no password is asked for here. "
                f"{self.reached[0]} says: {said.rstrip('.')}. {try_it}"
            )
        if code == 127:  # the shell's, of a command that it does not find
            return (
                f"On {name} there is no ddp-notebook: it is not {there}, and not found on the PATH "
                f"of a command there. Install the package there, or say where it is: "
                f"{THERE_VARIABLE}=/path/to/ddp-notebook"
            )
        if code == 3 and last.startswith(f"{_NAME}: "):
            return f"On {name}: {last.removeprefix(f'{_NAME}: ')}"
        what = f"ddp-notebook {' '.join(words)}"
        return f"On {name} `{what}` failed with exit code {code}. Its last words: {last}"


_NAME = "ddp-notebook"


def by_ssh(name: str) -> Host:
    """Return a host, as the user's ssh knows it: ``gpu07``, ``me@gpu07``. Raises UsageMistake."""
    if not HOST_NAME.fullmatch(name):
        raise UsageMistake(f"{plain(name)!r} is not the name of a host.")
    program = ssh_command()
    # No terminal, no agent and no X11 are passed on (-T -a -x): what runs there needs none, and a
    # host on which another user is root should get none. BatchMode: a question for a password that
    # no one sees would wait until the time limit.
    options = ("-o", "BatchMode=yes", "-o", f"ConnectTimeout={10}")
    reached = (*program, *options, "-T", "-a", "-x", "--", name)
    return Host(name, reached, shlex.join((*program, name, "true")), joins=True)


def of_slurm(job: str) -> tuple[str, tuple[Host, ...]]:
    """Return of a running job of Slurm's the number that its processes know, and its hosts.

    Raises UsageMistake.
    """
    if not _JOB.fullmatch(job):
        raise UsageMistake(f"{plain(job)!r} is not the number of a Slurm job. Type: --slurm 991234")
    # A job of an array, such as 12_3, has a number of its own, which its processes know.
    told = _slurms("squeue", "--noheader", f"--jobs={job}", "--format=%A %T %N")
    rows = [line.split() for line in told]
    running = [row for row in rows if len(row) == 3 and row[1] in ("RUNNING", "COMPLETING")]
    if len(running) != 1:
        why = "several jobs of this array run: name one, as in 12_3"
        if not running:
            states = ", ".join(sorted({row[1].lower() for row in rows if len(row) > 1}))
            why = f"it does not run{f', but is {states}' if states else ''}"
        raise UsageMistake(f"Slurm job {job} cannot be looked at: {why}. See: squeue --me")
    number, _, nodes = running[0]
    names = _slurms("scontrol", "show", "hostnames", nodes)[:1024]
    return number, tuple(
        Host(
            name,
            (*_SRUN, f"--jobid={number}", f"--nodelist={name}"),
            f"srun --overlap --jobid={number} --nodelist={name} true",
        )
        for name in names
        if HOST_NAME.fullmatch(name)
    )


_SRUN = ("srun", "--overlap", "--nodes=1", "--ntasks=1", "--input=none", "--quiet", "--mpi=none")
_JOB = re.compile(r"[0-9]{1,12}(_[0-9]{1,9})?")


def _slurms(*call: str) -> list[str]:
    """Return the lines that a command of Slurm's prints here. Raises UsageMistake."""
    if shutil.which(call[0]) is None:
        raise UsageMistake(
            f"{call[0]} is not installed here: use --slurm where Slurm's commands are, such as on "
            "a login node."
        )
    code, output, errors = _output(call)
    if code != 0:
        why = errors or f"exit code {code}"
        raise UsageMistake(f"Slurm did not say where the job runs: {why}")
    return preformatted(output.decode(errors="replace").rstrip())


def listed(host: str, *options: str) -> str:
    """Return what `ddp-notebook jobs` prints on a host that ssh reaches. Raises UsageMistake."""
    text = by_ssh(host).run(("jobs", *options)).decode(errors="replace")
    return "\n".join(preformatted(text.rstrip()))


def _output(call: Sequence[str]) -> tuple[int | None, bytes, str]:
    """Return a command's exit code, None if it took too long, its output, its last error line."""
    late = threading.Event()
    # Error output goes to a file: what ssh leaves running for other connections keeps it open, and
    # a pipe would not end. `communicate(timeout=)` would keep all of the output in memory; this
    # reads to a bound, and a timer ends what takes too long.
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(
            call, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors
        ) as process,
    ):

        def end() -> None:
            late.set()
            process.kill()

        limit = threading.Timer(_WITHIN_S, end)
        limit.daemon = True
        limit.start()
        try:
            assert process.stdout is not None
            output = process.stdout.read(LARGEST_FILE + 1)
            if len(output) > LARGEST_FILE:
                process.kill()
            code = process.wait()
        except BaseException:  # an interrupt: Popen would wait for the command's end
            process.kill()
            raise
        finally:
            limit.cancel()
        errors.seek(0)
        said = errors.read(1 << 16).decode(errors="replace").strip().splitlines()
    if len(output) > LARGEST_FILE:
        raise UsageMistake(
            f"{call[0]} printed more than {LARGEST_FILE >> 20} MiB, more than a job has."
        )
    return (None if late.is_set() else code), output, cut(plain(said[-1]), 500) if said else ""


# -- joined ----------------------------------------------------------------------------------

NOT_SEEN = "no process of it was found on the hosts that were asked"
Runs = Mapping[str, SavedRun]
"""The observations, by host."""


def joined(runs: Runs) -> Case:
    """Return the case of all ranks, with the times of this host's clock."""
    cases = {host: _here(run) for host, run in runs.items()}
    size = max(case.world_size for case in cases.values())
    reports = {rank: RankReport(rank, doing=NOT_SEEN) for rank in range(size)}
    groups: dict[str, tuple[int, ...]] = {}
    of: dict[int, tuple[Collective, ...]] = {}
    first: dict[int, int] = {}
    sources: dict[str, str] = {}
    for host, case in cases.items():
        there = observed(runs[host]).ranks
        known = case.collectives
        reports |= {
            e.rank: replace(e, network=replace(e.network, host=e.network.host or host))
            for e in case.ranks
            if e.rank in there
        }
        # Each host reports on all ranks of the job, and of those that are not its own says that
        # none was seen: that must not replace what another host has seen of them.
        of |= {rank: records for rank, records in known.of.items() if rank in there}
        first |= {rank: number for rank, number in known.first.items() if rank in there}
        groups = {**known.groups, **groups}
        sources = {**case.sources, **sources}
    return replace(
        next(iter(cases.values())),
        ranks=tuple(reports[rank] for rank in range(size)),
        collectives=Collectives(of, groups, first),
        sources=sources,
    )


def diagnosed(runs: Runs) -> Diagnosis:
    """Return what is wrong with the job, as far as one look tells; on one host, what it found."""
    # A host that sees all of a job has looked at it twice, with what it alone can read. Of several,
    # the records of collectives are put side by side here, and judged as those of one host are.
    if len(runs) == 1:
        (run,) = runs.values()
        return run.diagnosis or prepared.by_rules(joined(runs))
    if not all(observed(run).prepared for run in runs.values()):
        return _one_by_one(runs)
    case = joined(runs)
    seen = set().union(*(observed(run).ranks for run in runs.values()))
    diagnosis = prepared.by_rules(case, all_seen=seen.issuperset(range(case.world_size)))
    if diagnosis.wrong:
        return diagnosis
    silent = case.where(Activity.SILENT)
    running = case.where(Activity.BUSY, Activity.WAITING, Activity.HELD)
    unsure = diagnosis.unsure
    if silent:
        unsure = f"No problem found so far: {verb(silent, 'was', 'were')} not seen."
    elif running and not unsure:
        unsure = f"No problem found so far: {name_ranks(running)} still run."
    return replace(diagnosis, unsure=unsure)


def judged(diagnosis: Diagnosis, runs: Runs) -> Verdict:
    """Return a diagnosis with what it stands on."""
    basis = "; ".join(f"{plain(observed(run).basis)}, on {host}" for host, run in runs.items())
    notes = (
        f"{host}: {plain(note)}" for host, run in runs.items() for note in observed(run).unread
    )
    return for_others(diagnosis, basis, notes)


def observed(run: SavedRun) -> Observed:
    """Return how a host looked at the job."""
    return run.observed or Observed("a job")


def _one_by_one(runs: Runs) -> Diagnosis:
    """Return what was found on each host: stacks do not tell which collectives of hosts meet."""
    diagnosis = prepared.by_rules(Case(joined(runs).ranks))
    findings = [
        finding for run in runs.values() if run.diagnosis for finding in run.diagnosis.findings
    ]
    return replace(diagnosis, findings=tuple(findings), unsure="" if findings else _ONE_BY_ONE)


_ONE_BY_ONE = (
    "Undecided: the job was not prepared, and from outside what ranks of one host wait for on "
    "another is not seen."
)


def _here(run: SavedRun) -> Case:
    """Return its case, with times as this host's clock has them.

    The clocks of hosts begin at different times. Each host tells the time of day with its clock, so
    times can be compared as far as the hosts agree on the time of day.
    """
    case = run.case or Case(())
    late_ns = run.wall_ns - run.snapshot.taken_ns - (time.time_ns() - time.monotonic_ns())

    def at(there_ns: int) -> int:
        return there_ns + late_ns if there_ns else 0  # 0, for none, stays

    def shifted(record: Collective) -> Collective:
        return replace(record, issued_ns=at(record.issued_ns), done_ns=at(record.done_ns))

    of = {rank: tuple(map(shifted, records)) for rank, records in case.collectives.of.items()}
    ranks = tuple(replace(report, called_ns=at(report.called_ns)) for report in case.ranks)
    return replace(case, ranks=ranks, collectives=replace(case.collectives, of=of))


# -- as one target ---------------------------------------------------------------------------


def named(words: Sequence[str], slurm: str | None = None) -> Target:
    """Return what a user names, on this host or on others, each by HOST:PID.

    `slurm` is the number of a job of Slurm's, with no words beside it. Raises UsageMistake.
    """
    if slurm is not None:
        if words:
            raise UsageMistake("Give --slurm or a job, not both.")
        number, nodes = of_slurm(slurm)
        return Elsewhere([(node, f"{OF_SLURM}{number}") for node in nodes])
    if not words or not is_elsewhere(words[0]):
        return on_this_host(words)
    pid_on = {match[1]: match[2] for match in map(ELSEWHERE.fullmatch, words) if match}
    if len(pid_on) < len(words):
        raise UsageMistake("Name a job on other hosts by one HOST:PID for each of them.")
    return Elsewhere([(by_ssh(host), pid) for host, pid in pid_on.items()])


class Elsewhere(Target):
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

    def look(self) -> tuple[Case, Verdict]:
        """Ask all hosts; where there are several, find what is so in two looks at all of them."""
        diagnosis = diagnosed(self._look())
        if diagnosis.wrong and len(self._runs) > 1:  # of one host, it has looked twice itself
            diagnosis = prepared.in_both(diagnosis, diagnosed(self._look()))
        verdict = judged(diagnosis, self._runs)
        here = metadata.version("ddp-notebook")
        versions = {host: run.versions.get("ddp_notebook") for host, run in self._runs.items()}
        others = (
            f"{host} has ddp_notebook {plain(there)}, this host has {here}: answers on the job may "
            "differ"
            for host, there in versions.items()
            if there and there != here
        )
        unread = (*verdict.unread, *self._missing, *others)
        return joined(self._runs), replace(verdict, unread=unread)

    def reports(self) -> Sequence[RankReport]:
        """Ask all hosts."""
        return joined(self._look()).ranks

    def observed(self) -> Observed:
        """Return how it was looked at."""
        ranks = tuple(rank for run in self._runs.values() for rank in observed(run).ranks)
        return replace(super().observed(), ranks=ranks)

    @property
    def over(self) -> bool:  # type: ignore[override]
        """True when nothing of it runs on any host."""
        return all(run.snapshot.ended for run in self._runs.values())

    def where(self, ranks: Ranks | None = None, locals: bool = False) -> StackTree:
        """Return the stacks of `ranks`, as the hosts show them."""
        options = ["--json", "--stacks", *(["--locals"] if locals else [])]
        options += [] if ranks is None else ["--ranks", format_ranks(ranks)]
        stacks: dict[int, RankStack] = {}
        for host, output in self._answers("where", *options).items():
            run = self._runs.get(host)
            there = None if run is None or len(self._hosts) == 1 else observed(run).ranks
            try:
                wire: Any = json.loads(output[output.find(b"{") :])
                found = codec.decode(tuple[RankStack, ...], codec.readable(wire.get("stacks")))
            except (DecodeError, ValueError, AttributeError, RecursionError) as error:
                raise UsageMistake(f"The answer of {host} cannot be read: {error}.") from None
            stacks |= {stack.rank: stack for stack in found if there is None or stack.rank in there}
        return stack_tree.merge(stacks.values(), self.world_size)

    # -- how they are asked ----------------------------------------------------------------------

    def _look(self) -> dict[str, SavedRun]:
        """Return what each host knows now. Raises UsageMistake for what is no run."""
        runs = {}
        for host, output in self._answers("save", "-").items():
            # It is the last line: a shell's start-up files may have printed before.
            text = output.strip().rpartition(b"\n")[2]
            run = runs[host] = Replay.of_text(text, f"the answer of {host}").saved
            name = observed(run).name
            if self._names.setdefault(host, name) != name:
                raise UsageMistake(f"{self.name} is gone; {plain(name)} runs there now.")
        self._runs = runs
        return runs

    def _answers(self, command: str, *options: str) -> dict[str, bytes]:
        """Return what each host prints; `_missing` says which do not, and why."""

        def run(host: Host, word: str) -> bytes | UsageMistake:
            try:
                return host.run((command, word, *options))
            except UsageMistake as mistake:
                return mistake

        with ThreadPoolExecutor(min(len(self._hosts), 16)) as pool:
            answers = list(pool.map(run, self._hosts, self._words))
        wrong = [answer for answer in answers if isinstance(answer, UsageMistake)]
        if len(wrong) == len(answers):
            raise wrong[0]
        self._missing = tuple(map(str, wrong))
        pairs = zip(self._hosts, answers, strict=True)
        return {host.name: out for host, out in pairs if isinstance(out, bytes)}
