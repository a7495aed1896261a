"""Every fault of the lab, one entry each, in the order of the list that `%ddp_fault` prints."""

from __future__ import annotations

from functools import partial

from ddp_notebook.faults.fault import ALL, OTHERS, Fault, Kind, TwoHosts
from ddp_notebook.model import Category

_settings = partial(Fault, kind=Kind.SETTINGS)
_script = partial(Fault, kind=Kind.SCRIPT, store="rank0")
_model = partial(Fault, kind=Kind.MODEL, category=Category.PARAM_MISMATCH, culprits=(1,))
_NAMESPACES = (
    "two network namespaces of this machine stand for the hosts, with rank 1 alone on the second; "
    "that needs Linux and root"
)
_two_hosts = partial(Fault, kind=Kind.HOSTS, store="rank0", job="two_hosts", simulated=_NAMESPACES)
_firewall = partial(
    _two_hosts, simulated=f"{_NAMESPACES}. A routing rule drops what a firewall would"
)

_FAULTS = (
    _settings(
        name="port-held",
        title="MASTER_PORT is held by another process",
        lesson="Rank 0 must listen at MASTER_PORT, and another program already does. Rank 0 fails "
        "at once with EADDRINUSE, while the others talk to that program or wait.",
        category=Category.PORT_IN_USE,
        culprits=(0,),
        settings={ALL: {"MASTER_PORT": "{held_port}"}},
        store="rank0",
    ),
    _settings(
        name="port-race",
        title="many jobs start at once and want one port",
        lesson="A port that was free when it was chosen is in use when rank 0 binds it: another "
        "job was faster. The remedy is to choose again and try again, or to let the system choose "
        "(port 0), which %ddp_init does.",
        category=Category.PORT_IN_USE,
        culprits=(0,),
        settings={ALL: {"MASTER_PORT": "{held_port}"}},
        store="rank0",
        simulated="the port is taken before rank 0 binds it: rank 0 loses the race every time",
    ),
    _settings(
        name="own-ports",
        title="every rank picks a free port of its own",
        lesson="find_free_port() was called on every rank, so each has another MASTER_PORT. Rank 0 "
        "listens at its own, and no rank ever connects.",
        category=Category.ENV_MISMATCH,
        culprits=(OTHERS,),
        settings={ALL: {"MASTER_PORT": "{free_port}"}},
        store="rank0",
    ),
    _settings(
        name="wrong-port",
        title="MASTER_PORT is wrong on one rank",
        lesson="One rank connects to a port where no process listens, again and again. The others "
        "have reached the store and wait for it.",
        category=Category.ENV_MISMATCH,
        culprits=(1,),
        settings={1: {"MASTER_PORT": "{free_port}"}},
    ),
    _settings(
        name="address-unreachable",
        title="MASTER_ADDR is an address that does not answer",
        lesson="All ranks connect to a machine that does not answer. They cannot tell: a silent "
        "network and a slow one look the same until the timeout.",
        category=Category.UNREACHABLE_MASTER,
        culprits=(ALL,),
        settings={ALL: {"MASTER_ADDR": "203.0.113.7"}},
    ),
    _settings(
        name="address-unresolved",
        title="MASTER_ADDR is a name that does not resolve",
        lesson="The resolver does not know the name: a typing error, or a host of another network. "
        "torch tries again until the timeout.",
        category=Category.UNREACHABLE_MASTER,
        culprits=(ALL,),
        settings={ALL: {"MASTER_ADDR": "no-such-host.invalid"}},
    ),
    _settings(
        name="address-unset",
        title="MASTER_ADDR is not set on one rank",
        lesson="env:// needs four variables, and one is missing on a rank. That rank fails at "
        "once; the others wait for it.",
        category=Category.ENV_INVALID,
        culprits=(1,),
        settings={1: {"MASTER_ADDR": ""}},
    ),
    _settings(
        name="duplicate-rank",
        title="two processes say RANK=1",
        lesson="Both write the same key, so the store counts one rank. All wait for the rank that "
        "is missing, and torch's timeout message names a wrong one.",
        category=Category.DUPLICATE_RANK,
        culprits=(2,),
        settings={2: {"RANK": "1"}},
        min_ranks=3,
    ),
    _settings(
        name="duplicate-zero",
        title="two processes say RANK=0",
        lesson="Each of them wants to host the store at one port. One gets it, the other fails, "
        "and rank 1 never joins.",
        category=Category.DUPLICATE_RANK,
        culprits=(1,),
        settings={1: {"RANK": "0"}},
        store="rank0",
    ),
    _settings(
        name="rank-out-of-range",
        title="RANK is not below WORLD_SIZE",
        lesson="Ranks are counted from 0, so the last is WORLD_SIZE - 1. A rank that counts from 1 "
        "fails at once, and the others wait.",
        category=Category.ENV_INVALID,
        culprits=(1,),
        settings={1: {"RANK": "{world_size}"}},
    ),
    _settings(
        name="stale-variables",
        title="RANK and WORLD_SIZE are left over from an earlier run",
        lesson="A shell still exports RANK=0 and WORLD_SIZE=1, and one process reads them. It "
        "makes a group of one rank; the others wait for it.",
        category=Category.ENV_MISMATCH,
        culprits=(1,),
        settings={1: {"RANK": "0", "WORLD_SIZE": "1"}},
    ),
    _settings(
        name="wrong-interface",
        title="GLOO_SOCKET_IFNAME names an interface that does not exist",
        lesson="gloo looks for the network interface by name and fails at once if none "
        "matches. The name was copied from another machine.",
        category=Category.WRONG_INTERFACE,
        culprits=(1,),
        settings={1: {"GLOO_SOCKET_IFNAME": "bogus0"}},
    ),
    _settings(
        name="different-backends",
        title="one rank asks for another backend",
        lesson="Ranks can only communicate over the same backend. One that asks for another never "
        "meets the rest.",
        category=Category.ENV_MISMATCH,
        culprits=(1,),
        settings={1: {"BACKEND": "nccl"}},
    ),
    _script(
        name="no-free-port",
        title="no port of a fixed range is free",
        lesson="Rank 0 may only use three ports, as behind a firewall, and other processes hold "
        "them all. It finds none and fails; the others wait.",
        category=Category.PORT_EXHAUSTED,
        culprits=(0,),
    ),
    _script(
        name="world-size-differs",
        title="WORLD_SIZE differs on one rank",
        lesson="init_process_group succeeds, because each rank finds all that it looks for. Only "
        "the first collective hangs, because the ranks disagree how many they are.",
        category=Category.ENV_MISMATCH,
        culprits=(0,),
        min_ranks=3,
    ),
    _script(
        name="missing-rank",
        title="one rank never calls init_process_group",
        lesson="It took another branch and has finished. The others wait for it, and will for half "
        "an hour.",
        category=Category.MISSING_RANK,
        culprits=(1,),
    ),
    _script(
        name="late-rank",
        title="one rank comes ten seconds late",
        lesson="It loads its data first, and the others wait in init_process_group. That is slow, "
        "but no hang: it will call it.",
        category=Category.STRAGGLER,
        culprits=(1,),
        passes=True,
    ),
    _script(
        name="starved-rank",
        title="one rank gets hardly any CPU",
        lesson="It computes at the lowest priority before it calls init_process_group. It is busy, "
        "not stuck, however long that takes.",
        category=Category.STRAGGLER,
        culprits=(1,),
        passes=True,
    ),
    _script(
        name="waits-for-file",
        title="a rank waits for a file that another one has not written",
        lesson="Rank 1 waits for a file that rank 0 writes after init_process_group, and rank 0 "
        "waits there for rank 1. Each waits for the other.",
        category=Category.FILESYSTEM,
        culprits=(1,),
    ),
    _script(
        name="stale-file",
        title="the file of file:// is left from an earlier run",
        lesson="A run that was killed leaves its file, with the addresses of its processes. The "
        "next run reads them and connects to processes that are gone.",
        category=Category.STALE_STORE,
        culprits=(ALL,),
    ),
    _script(
        name="file-not-writable",
        title="one rank may not write the file of file://",
        lesson="It runs as another user, or the file system is read-only there. It fails; the "
        "others wait for its address.",
        category=Category.FILESYSTEM,
        culprits=(1,),
        simulated="rank 1 tries to write where no process may, because root may write anywhere",
    ),
    _script(
        name="short-timeout",
        title="one rank has a shorter timeout",
        lesson="Rank 1 calls init_process_group after five seconds, and rank 0 stops waiting after "
        "three. The timeouts differ, so the shortest decides.",
        category=Category.ENV_MISMATCH,
        culprits=(0,),
    ),
    _script(
        name="init-twice",
        title="init_process_group is called twice",
        lesson="A library had called it already. The second call fails on that rank, while the "
        "others continue and wait for it in a barrier.",
        category=Category.DOUBLE_INIT,
        culprits=(1,),
    ),
    _script(
        name="other-version",
        title="one rank has another torch",
        lesson="Two environments, two versions of torch: what they write into the store does not "
        "match. Each version waits for keys that the other never writes.",
        category=Category.VERSION_MISMATCH,
        culprits=(1,),
        simulated="rank 1 only says that its torch is 1.13.0, and writes other keys",
    ),
    _script(
        name="out-of-memory",
        title="rank 0 has no memory left when DDP is built",
        lesson="Rank 0 runs out of memory while it prepares the broadcast of its parameters. The "
        "others wait for the broadcast.",
        category=Category.OOM_ON_ONE_RANK,
        culprits=(0,),
    ),
    _two_hosts(
        name="other-host-localhost",
        title="MASTER_ADDR is localhost, and one rank is on another host",
        lesson="On each host localhost is that host. The rank on the second host connects to its "
        "own host, where no process listens.",
        category=Category.HOSTNAME_LOOPBACK,
        culprits=(1,),
        settings={ALL: {"MASTER_ADDR": "localhost"}},
    ),
    _two_hosts(
        name="loopback-name",
        title="the name of one host means 127.0.0.1",
        lesson="gloo listens at the address that its host's name resolves to, and sends it to the "
        "others. They connect to 127.0.0.1 on their own host, where another process listens or "
        "none.",
        category=Category.HOSTNAME_LOOPBACK,
        culprits=(1,),
        settings={1: {"GLOO_SOCKET_IFNAME": ""}},
        hosts=TwoHosts(name="localhost"),
    ),
    _firewall(
        name="firewall-store",
        title="a firewall drops what is for MASTER_PORT",
        lesson="Rank 0 listens, and packets from the other host are dropped silently. The rank "
        "there tries again and again until its timeout.",
        category=Category.UNREACHABLE_MASTER,
        culprits=(1,),
        hosts=TwoHosts(drops="store"),
    ),
    _firewall(
        name="firewall-ranks",
        title="a firewall drops everything but MASTER_PORT",
        lesson="All ranks reach the store, so rendezvous seems to work. Then they connect to each "
        "other at ports that the system chose, and those are blocked.",
        category=Category.FIREWALL,
        culprits=(ALL,),
        hosts=TwoHosts(drops="ranks"),
    ),
    _model(
        name="model-number",
        title="the model has one layer more on a rank",
        lesson="DDP pairs parameters by their position, so the numbers must agree. One rank built "
        "another model, by a condition on its rank.",
        change="self.third = torch.nn.Linear(8, 2)",
    ),
    _model(
        name="model-shape",
        title="a layer has another size on a rank",
        lesson="The broadcast of a tensor into one of another shape cannot work. gloo hangs or "
        "aborts the process.",
        change="self.first = torch.nn.Linear(8, 5)",
    ),
    _model(
        name="model-dtype",
        title="a layer has another dtype on a rank",
        lesson="The bytes of half precision are read as single precision. Nothing hangs; the "
        "numbers are silently wrong.",
        change="self.second = self.second.half()",
    ),
    _model(
        name="model-order",
        title="two layers are registered in another order on a rank",
        lesson="DDP pairs parameters by their position and not by their name. The gradients of one "
        "layer are added to those of the other.",
        change="del self.first, self.second\n"
        "self.second, self.first = torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)",
    ),
    _model(
        name="model-buffers",
        title="the model has one buffer more on a rank",
        lesson="Buffers are broadcast before each forward. One rank expects one broadcast more "
        "than the others take part in.",
        change='self.register_buffer("seen", torch.zeros(1))',
    ),
)

FAULTS: dict[str, Fault] = {fault.name: fault for fault in _FAULTS}
"""By name."""
