"""Every fault of the lab, as data."""

from __future__ import annotations

from ddp_notebook.faults.fault import ALL, OTHERS, Fault, Kind
from ddp_notebook.faults.two_hosts import TWO_HOSTS
from ddp_notebook.model import Category

_SETTINGS = (
    Fault(
        "port-held",
        "MASTER_PORT is held by another process",
        "Rank 0 must listen at MASTER_PORT, and another program already does. Rank 0 fails at "
        "once with EADDRINUSE, while the others talk to a stranger or wait.",
        Category.PORT_IN_USE,
        (0,),
        settings={ALL: {"MASTER_PORT": "{held_port}"}},
        store="rank0",
    ),
    Fault(
        "port-race",
        "many jobs start at once and want one port",
        "A port that was free when it was chosen is taken when rank 0 binds it: somebody else was "
        "faster. The remedy is to choose again and try again, or to let the system choose (port "
        "0), which %ddp_init does.",
        Category.PORT_IN_USE,
        (0,),
        settings={ALL: {"MASTER_PORT": "{held_port}"}},
        store="rank0",
        simulated="the port is taken before rank 0 comes: it loses the race every time",
    ),
    Fault(
        "own-ports",
        "every rank picks a free port of its own",
        "find_free_port() was called on every rank, so each has another MASTER_PORT. Rank 0 "
        "listens at its own and nobody ever comes.",
        Category.ENV_MISMATCH,
        (OTHERS,),
        settings={ALL: {"MASTER_PORT": "{free_port}"}},
        store="rank0",
    ),
    Fault(
        "wrong-port",
        "MASTER_PORT is wrong on one rank",
        "One rank knocks at a port where nobody listens and tries again and again. The others "
        "have met and wait for it.",
        Category.ENV_MISMATCH,
        (1,),
        settings={1: {"MASTER_PORT": "{free_port}"}},
    ),
    Fault(
        "address-unreachable",
        "MASTER_ADDR is an address where nobody answers",
        "All ranks knock at a machine that does not answer. Nothing tells them so: a silent "
        "network and a slow one look alike until the time-out.",
        Category.UNREACHABLE_MASTER,
        (ALL,),
        settings={ALL: {"MASTER_ADDR": "203.0.113.7"}},
    ),
    Fault(
        "address-unresolved",
        "MASTER_ADDR is a name that does not resolve",
        "The name is unknown to the resolver: a typing error, or a host of another network. torch "
        "tries again until the time-out.",
        Category.UNREACHABLE_MASTER,
        (ALL,),
        settings={ALL: {"MASTER_ADDR": "no-such-host.invalid"}},
    ),
    Fault(
        "address-unset",
        "MASTER_ADDR is not set on one rank",
        "env:// needs four variables, and one is missing on a rank. That rank fails at once; the "
        "others wait for it.",
        Category.ENV_INVALID,
        (1,),
        settings={1: {"MASTER_ADDR": ""}},
    ),
    Fault(
        "duplicate-rank",
        "two processes say RANK=1",
        "Both write the same key, so the store counts one rank. All wait for the rank whose place "
        "nobody takes, and torch's time-out names that one: the wrong one.",
        Category.DUPLICATE_RANK,
        (2,),
        settings={2: {"RANK": "1"}},
        min_ranks=3,
    ),
    Fault(
        "duplicate-zero",
        "two processes say RANK=0",
        "Each of them wants to host the store at one port. One gets it, the other fails, and "
        "rank 1 never comes.",
        Category.DUPLICATE_RANK,
        (1,),
        settings={1: {"RANK": "0"}},
        store="rank0",
    ),
    Fault(
        "rank-out-of-range",
        "RANK is not below WORLD_SIZE",
        "Ranks are counted from 0, so the last is WORLD_SIZE - 1. A rank that counts from 1 fails "
        "at once, and the others wait.",
        Category.ENV_INVALID,
        (1,),
        settings={1: {"RANK": "{world_size}"}},
    ),
    Fault(
        "stale-variables",
        "RANK and WORLD_SIZE are left over from an earlier run",
        "A shell still exports RANK=0 and WORLD_SIZE=1, and one process takes them for its own. It "
        "believes to be alone; the others wait for it.",
        Category.ENV_MISMATCH,
        (1,),
        settings={1: {"RANK": "0", "WORLD_SIZE": "1"}},
    ),
    Fault(
        "wrong-interface",
        "GLOO_SOCKET_IFNAME names an interface that does not exist",
        "gloo looks for the network interface by name and fails at once where there is none. It "
        "was copied from another machine.",
        Category.WRONG_INTERFACE,
        (1,),
        settings={1: {"GLOO_SOCKET_IFNAME": "bogus0"}},
    ),
    Fault(
        "different-backends",
        "one rank asks for another backend",
        "Ranks can only talk in the same backend. One that asks for another never meets the rest.",
        Category.ENV_MISMATCH,
        (1,),
        settings={1: {"BACKEND": "nccl"}},
    ),
)


def _script(
    name: str,
    title: str,
    lesson: str,
    category: Category,
    culprits: tuple[int, ...],
    job: str = "",
    store: str = "rank0",
    min_ranks: int = 2,
    passes: bool = False,
    simulated: str = "",
) -> Fault:
    """A fault that is a script, in a plain script's circumstances."""
    return Fault(
        name,
        title,
        lesson,
        category,
        culprits,
        kind=Kind.SCRIPT,
        store=store,
        job=job or name.replace("-", "_"),
        min_ranks=min_ranks,
        passes=passes,
        simulated=simulated,
    )


_SCRIPTS = (
    _script(
        "no-free-port",
        "no port of a fixed range is free",
        "Rank 0 may only use three ports, as behind a firewall, and others hold them all. It finds "
        "none and fails; the others wait.",
        Category.PORT_EXHAUSTED,
        (0,),
    ),
    _script(
        "world-size-differs",
        "WORLD_SIZE differs on one rank",
        "init_process_group succeeds, because each rank finds whom it looks for. Only the first "
        "collective hangs, when the ranks count differently.",
        Category.ENV_MISMATCH,
        (0,),
        min_ranks=3,
    ),
    _script(
        "missing-rank",
        "one rank never calls init_process_group",
        "It took another branch and is done. The others wait for it, and will for half an hour.",
        Category.MISSING_RANK,
        (1,),
    ),
    _script(
        "late-rank",
        "one rank comes ten seconds late",
        "It loads its data first, and the others wait in init_process_group. That is slow, and no "
        "hang: it will come.",
        Category.STRAGGLER,
        (1,),
        passes=True,
    ),
    _script(
        "starved-rank",
        "one rank gets hardly any CPU",
        "It computes at the lowest priority before it comes. It is busy, not stuck, however long "
        "that takes.",
        Category.STRAGGLER,
        (1,),
        passes=True,
    ),
    _script(
        "waits-for-file",
        "a rank waits for a file that another one has not written",
        "Rank 1 waits for a file that rank 0 writes after init_process_group, and rank 0 waits "
        "there for rank 1. Each waits for the other.",
        Category.FILESYSTEM,
        (1,),
    ),
    _script(
        "stale-file",
        "the file of file:// is left from an earlier run",
        "A run that was killed leaves its file, with the addresses of processes that are gone. The "
        "next run reads them and calls nobody.",
        Category.STALE_STORE,
        (ALL,),
    ),
    _script(
        "file-not-writable",
        "one rank may not write the file of file://",
        "It runs as another user, or on a file system that is read-only there. It fails; the "
        "others wait for its address.",
        Category.FILESYSTEM,
        (1,),
        simulated="rank 1 tries to write where no process may, because root may write anywhere",
    ),
    _script(
        "short-timeout",
        "one rank has a shorter time-out",
        "Rank 1 comes after five seconds, and rank 0 gives up after three. The time-outs differ, "
        "so the shortest decides.",
        Category.ENV_MISMATCH,
        (0,),
    ),
    _script(
        "init-twice",
        "init_process_group is called twice",
        "A library had called it already. The second call fails on that rank, while the others go "
        "on and wait for it in a barrier.",
        Category.DOUBLE_INIT,
        (1,),
    ),
    _script(
        "other-version",
        "one rank has another torch",
        "Two environments, two versions of torch: what they write into the store does not match. "
        "Each side waits for the other's words.",
        Category.VERSION_MISMATCH,
        (1,),
        simulated="rank 1 only says that its torch is 1.13.0, and writes other keys",
    ),
    _script(
        "out-of-memory",
        "rank 0 has no memory left when DDP is built",
        "Rank 0 runs out of memory while it prepares the broadcast of its parameters. The others "
        "wait for the broadcast.",
        Category.OOM_ON_ONE_RANK,
        (0,),
    ),
)


def _model(variant: str, title: str, lesson: str) -> Fault:
    return Fault(
        f"model-{variant}",
        title,
        lesson,
        Category.PARAM_MISMATCH,
        (1,),
        kind=Kind.MODEL,
        variant=variant,
    )


_MODELS = (
    _model(
        "number",
        "the model has one layer more on a rank",
        "DDP pairs parameters by their place, so the numbers must agree. One rank built another "
        "model, by a condition on its rank.",
    ),
    _model(
        "shape",
        "a layer has another size on a rank",
        "The broadcast of a tensor into one of another shape cannot work. gloo hangs or aborts "
        "the process.",
    ),
    _model(
        "dtype",
        "a layer has another dtype on a rank",
        "The bytes of half precision are read as single precision. Nothing hangs; the numbers "
        "are silently wrong.",
    ),
    _model(
        "order",
        "two layers are registered in another order on a rank",
        "DDP pairs parameters by their place and not by their name. The gradients of one layer "
        "are added to those of the other.",
    ),
    _model(
        "buffers",
        "the model has one buffer more on a rank",
        "Buffers are broadcast before each forward. One rank expects one more broadcast than the "
        "others take part in.",
    ),
)

FAULTS: dict[str, Fault] = {
    fault.name: fault for fault in (*_SETTINGS, *_SCRIPTS, *TWO_HOSTS, *_MODELS)
}
"""By name."""
