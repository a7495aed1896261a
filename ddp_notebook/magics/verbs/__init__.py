"""The verbs, a file or a family each. A new verb: a file here, and a line in `VERBS`.

attach.py       `%ddp_attach`, `%ddp_detach`: a job that no notebook started.
bench.py        `%ddp_bench`: what communication costs, in collectives or in training steps.
debug.py        `%ddp_break`, `%ddp_frame`, `%ddp_print`, `%ddp_set`: ranks at lines.
ddp.py          `%ddp_wrap`: a model becomes a DistributedDataParallel, one visible stage at a time.
doctor.py       `%ddp_doctor`: can DDP work here?
files.py        `%ddp_save` and `%ddp_replay`: a run kept in a file, and looked at without ranks.
lab.py          `%ddp_fault`: the fault lab. `%ddp_tour`: five things to try.
look.py         `%ddp_status`, `%ddp_board`, `%ddp_why`, `%ddp_where`, `%ddp_step`, `%ddp_mesh`.
ranks.py        `%ddp_init`, `%ddp_restart`, `%ddp_abort`, `%ddp_shutdown`: from start to end.
run.py          `%%ddp`, `%ddp_run`, `%ddp_wait`: a cell or a script on the ranks.
values.py       `%ddp_vars`, `%ddp_push`, `%ddp_pull`, `%ddp_output`: variables and output.
"""

from ddp_notebook.magics.verb import Verb
from ddp_notebook.magics.verbs import (
    attach,
    bench,
    ddp,
    debug,
    doctor,
    files,
    lab,
    look,
    ranks,
    run,
    values,
)

VERBS: tuple[Verb, ...] = (
    ranks.INIT,
    run.CELL,
    run.SCRIPT,
    run.WAIT,
    look.STATUS,
    look.BOARD,
    look.WHY,
    look.WHERE,
    look.MESH,
    look.STEP,
    debug.BREAK,
    debug.FRAME,
    debug.PRINT,
    debug.SET,
    ranks.ABORT,
    ranks.RESTART,
    ranks.SHUTDOWN,
    values.VARS,
    values.PUSH,
    values.PULL,
    values.OUTPUT,
    ddp.WRAP,
    lab.FAULT,
    doctor.DOCTOR,
    bench.BENCH,
    attach.ATTACH,
    attach.DETACH,
    files.SAVE,
    files.REPLAY,
    lab.TOUR,
)
"""In the order of the reference."""
