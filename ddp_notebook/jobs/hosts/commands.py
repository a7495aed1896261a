"""Runs `ddp-notebook` on another host, by the user's ssh or Slurm's srun, and reads its output.

The commands that are run only look. Output is read to a bound and within a time limit; what is not
as expected is said in words, with what the other program said.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ddp_notebook.archive.replay import LARGEST_FILE
from ddp_notebook.errors import UsageMistake
from ddp_notebook.model import cut
from ddp_notebook.views.ansi import plain, preformatted

SSH_VARIABLE = "DDP_NOTEBOOK_SSH"
"""What to run in place of ssh, with its options: `ssh -J login`."""
THERE_VARIABLE = "DDP_NOTEBOOK_THERE"
"""Where `ddp-notebook` is on the other hosts."""
_WITHIN_S = 60.0
_CONNECTS_WITHIN_S = 10
_AT_ONCE = 16
_MOST_HOSTS = 1024
_MOST_SAID = 1 << 16
_NOT_FOUND, _SSHS_OWN, _OUR_USAGE = 127, 255, 3
_HOST = re.compile(r"[A-Za-z0-9_]([\w.@-]*[\w.])?", re.ASCII)
_RUN_THERE = 'if [ -x "$0" ]; then exec "$0" "$@"; fi; exec ddp-notebook "$@"'
"""What a shell there does: it prefers the same file as here, as where hosts share a file system."""


@dataclass(frozen=True, slots=True)
class Host:
    """Another host. `reached` are the words before a command that is to run there.

    `joins`: what runs them there hands one text to a shell, as ssh does.
    """

    name: str
    reached: tuple[str, ...]
    by_hand: str
    """What a user can try in a shell."""
    joins: bool = False

    def run(self, words: Sequence[str]) -> bytes:
        """What `ddp-notebook` with these words prints there, when it ends with code 0.

        Raises UsageMistake.
        """
        there = os.environ.get(THERE_VARIABLE) or str(Path(sys.executable).with_name(_NAME))
        command = ("sh", "-c", _RUN_THERE, there, *words)
        call = (*self.reached, *((shlex.join(command),) if self.joins else command))
        program = self.reached[0]
        if shutil.which(program) is None:
            raise UsageMistake(
                f"{plain(self.name)} cannot be asked: there is no program {program} here."
            )
        code, output, errors = _output(call)
        if code == 0:
            return output
        raise UsageMistake(self._why(code, errors, words, there))

    def _why(self, code: int | None, last: str, words: Sequence[str], there: str) -> str:
        """In words, why there is no output; `last` is the last line of error output."""
        name, try_it = self.name, f"Try it in a shell: {plain(self.by_hand)}"
        if code is None:
            said = f" Its last words: {last}" if last else ""
            return f"{name} gave no answer within {_WITHIN_S:.0f} s.{said} {try_it}"
        if code == _SSHS_OWN and self.joins:
            said = last or "nothing"
            return (
                f"{name} cannot be reached, and no password is asked for here. "
                f"{self.reached[0]} says: {said.rstrip('.')}. {try_it}"
            )
        if code == _NOT_FOUND:
            return (
                f"On {name} there is no ddp-notebook: it is not {there}, and not found on the PATH "
                f"of a command there. Install the package there, or say where it is: "
                f"{THERE_VARIABLE}=/path/to/ddp-notebook"
            )
        if code == _OUR_USAGE and last.startswith(f"{_NAME}: "):
            return f"On {name}: {last.removeprefix(f'{_NAME}: ')}"
        what = f"ddp-notebook {' '.join(words)}"
        return f"On {name} `{what}` failed with exit code {code}. Its last words: {last}"


_NAME = "ddp-notebook"


def by_ssh(name: str) -> Host:
    """A host, as the user's ssh knows it: ``gpu07``, ``me@gpu07``. Raises UsageMistake."""
    if not _HOST.fullmatch(name):
        raise UsageMistake(f"{plain(name)!r} is not the name of a host.")
    given = os.environ.get(SSH_VARIABLE, "")
    try:
        program = tuple(shlex.split(given)) or ("ssh",)
    except ValueError as error:
        raise UsageMistake(f"{SSH_VARIABLE}={plain(given)} is no command: {error}.") from None
    options = ("-o", "BatchMode=yes", "-o", f"ConnectTimeout={_CONNECTS_WITHIN_S}")
    reached = (*program, *options, "-T", "-a", "-x", "--", name)
    return Host(name, reached, shlex.join((*program, name, "true")), joins=True)


def of_slurm(job: str) -> tuple[str, tuple[Host, ...]]:
    """A job of Slurm's that runs: the number that its processes know, and its hosts.

    Raises UsageMistake.
    """
    if not _JOB.fullmatch(job):
        raise UsageMistake(f"{plain(job)!r} is no number of a job of Slurm's: --slurm 991234")
    # A job of an array, such as 12_3, has a number of its own, which its processes know.
    told = _slurms("squeue", "--noheader", f"--jobs={job}", "--format=%A %T %N")
    rows = [line.split() for line in told]
    running = [row for row in rows if len(row) == 3 and row[1] in ("RUNNING", "COMPLETING")]
    if len(running) != 1:
        why = "several jobs of this array run: name one, as in 12_3"
        if not running:
            states = ", ".join(sorted({row[1].lower() for row in rows if len(row) > 1}))
            why = f"it does not run{f', but is {states}' if states else ''}"
        raise UsageMistake(f"Job {job} of Slurm cannot be looked at: {why}. See: squeue --me")
    number, _, nodes = running[0]
    names = _slurms("scontrol", "show", "hostnames", nodes)[:_MOST_HOSTS]
    return number, tuple(
        Host(
            name,
            (*_SRUN, f"--jobid={number}", f"--nodelist={name}"),
            f"srun --overlap --jobid={number} --nodelist={name} true",
        )
        for name in names
        if _HOST.fullmatch(name)
    )


_SRUN = ("srun", "--overlap", "--nodes=1", "--ntasks=1", "--input=none", "--quiet", "--mpi=none")
_JOB = re.compile(r"[0-9]{1,12}(_[0-9]{1,9})?")


def _slurms(*call: str) -> list[str]:
    """The lines that a command of Slurm's prints here. Raises UsageMistake."""
    if shutil.which(call[0]) is None:
        raise UsageMistake(
            f"There is no {call[0]} here: --slurm works where Slurm's commands are, as on a login "
            "node."
        )
    code, output, errors = _output(call)
    if code != 0:
        why = errors or f"exit code {code}"
        raise UsageMistake(f"Slurm does not tell where the job runs: {why}")
    return preformatted(output.decode(errors="replace").rstrip())


def listed(host: str, *options: str) -> str:
    """What `ddp-notebook jobs` prints on a host that ssh reaches. Raises UsageMistake."""
    text = by_ssh(host).run(("jobs", *options)).decode(errors="replace")
    return "\n".join(preformatted(text.rstrip()))


def on_all(hosts: Sequence[Host], words: Sequence[Sequence[str]]) -> list[bytes | UsageMistake]:
    """What each host printed, or why it did not; `words` has a command for each."""

    def run(host: Host, of: Sequence[str]) -> bytes | UsageMistake:
        try:
            return host.run(of)
        except UsageMistake as mistake:
            return mistake

    with ThreadPoolExecutor(min(len(hosts), _AT_ONCE)) as pool:
        return list(pool.map(run, hosts, words))


def last_line(output: bytes) -> bytes:
    """The line with what was asked for: a shell's start-up files may have printed before."""
    return output.strip().rpartition(b"\n")[2]


def _output(call: Sequence[str]) -> tuple[int | None, bytes, str]:
    """Exit code of a command, None if it took too long, its output, and its last error line."""
    with tempfile.TemporaryFile() as errors, _started(call, errors) as process:
        late = threading.Event()

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
        finally:
            limit.cancel()
        errors.seek(0)
        said = errors.read(_MOST_SAID).decode(errors="replace").strip().splitlines()
    if len(output) > LARGEST_FILE:
        raise UsageMistake(f"{call[0]} printed more than {LARGEST_FILE >> 20} MiB: that is no job.")
    return (None if late.is_set() else code), output, cut(plain(said[-1]), 500) if said else ""


@contextlib.contextmanager
def _started(call: Sequence[str], errors: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """The process of a command; it is ended where it is left early, as by an interrupt.

    Error output goes to a file: what ssh leaves running for other connections keeps it open.
    """
    with subprocess.Popen(
        call, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors
    ) as process:
        try:
            yield process
        except BaseException:
            process.kill()
            raise
