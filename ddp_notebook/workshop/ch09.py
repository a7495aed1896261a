"""The exercises of notebook 9: from one machine to many."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddp_notebook.workshop.answers import near, number, one_of, shown, two, whole_number
from ddp_notebook.workshop.check import WrongAnswer, exercise

_TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_DIRECT = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS", "LOCAL_RANK": "SLURM_LOCALID"}

Told = list[Mapping[str, str]]
"""The variables that Slurm sets for each task."""
Made = list[Mapping[str, Any]]
"""The result of from_slurm, for each task."""
Layouts = Mapping[str, Told]
"""By the layout's name."""
Mapped = Mapping[str, Made]
"""The same, by the layout's name."""


@exercise("9.1", two("(host, local rank)", whole_number, whole_number))
def place_of_rank_5(place: tuple[int, int]) -> str:
    """Rank 5 with two ranks a host: the third host's second."""
    if place == (2, 1):
        return "right: 5 = 2 * 2 + 1. Divide by the ranks per host; the rest is the local rank."
    if place == (1, 2):
        raise WrongAnswer("these are the two numbers, in the other order: the host comes first.")
    if place == (3, 2) or place == (3, 1):
        raise WrongAnswer("hosts are counted from 0, as ranks are: 0 and 1 are on the first.")
    if place == (1, 1):
        raise WrongAnswer("that is with four ranks on each host. Here it is two on each of four.")
    host, local = place
    if not (0 <= host < 4 and 0 <= local < 2):
        raise WrongAnswer("hosts are 0 to 3, and local ranks 0 and 1. Ranks 0 and 1 are on host 0.")
    raise WrongAnswer(
        f"that is rank {2 * host + local}: RANK = GROUP_RANK * LOCAL_WORLD_SIZE + LOCAL_RANK."
    )


def _mapping(answer: Any) -> Mapping[Any, Any]:
    if not isinstance(answer, Mapping):
        raise WrongAnswer(f"from_slurm must return a dict; it returned {shown(answer)}.")
    return answer


def _mapped(answer: Any) -> tuple[Mapped, Layouts]:
    as_it_was = "leave the cells that call and check as they are."
    if not (isinstance(answer, tuple) and len(answer) == 2):
        raise WrongAnswer(as_it_was)
    mapped, layouts = answer
    if not (isinstance(layouts, Mapping) and layouts and all(map(_is_tasks, layouts.values()))):
        raise WrongAnswer(as_it_was)
    if not isinstance(mapped, Mapping):
        raise WrongAnswer(as_it_was)
    made = {}
    for name, told in layouts.items():
        if not (isinstance(mapped.get(name), list) and len(mapped[name]) == len(told)):
            raise WrongAnswer(
                f"there is not a dict for each task of the layout {name!r}: {as_it_was}"
            )
        made[name] = [_mapping(of_task) for of_task in mapped[name]]
    return made, layouts


def _is_tasks(told: Any) -> bool:
    return isinstance(told, list) and all(isinstance(task, Mapping) for task in told)


@exercise("9.2", _mapped)
def slurm_to_torch(answer: tuple[Mapped, Layouts]) -> str:
    """Three variables are taken over, two are made for the whole job."""
    mapped, layouts = answer
    for name, told in layouts.items():
        made = mapped[name]
        for got, slurm in zip(made, told, strict=True):
            _judge_form(f"layout {name!r}, task {slurm.get('SLURM_PROCID')}", got)
        for variable in _DIRECT:
            _judge_number(name, variable, made, told)
        _judge_meeting(name, made, told)
    return (
        "right, in every layout. Slurm knows best who is who: take SLURM_PROCID and SLURM_LOCALID "
        "as they are, and compute neither from the other."
    )


def _judge_form(where: str, got: Mapping[str, Any]) -> None:
    for name in _TORCH:
        if name not in got:
            raise WrongAnswer(f"{where}: {name} is missing.")
        if not isinstance(got[name], str):
            raise WrongAnswer(
                f"{where}: {name} is {shown(got[name])}, and os.environ takes text only: str(...)."
            )


def _judge_number(layout: str, name: str, made: Made, told: Told) -> None:
    """A variable of torch's that Slurm has under another name."""

    def is_everywhere(source: str) -> bool:
        return all(g[name] == slurm.get(source) for g, slurm in zip(made, told, strict=True))

    if is_everywhere(_DIRECT[name]):
        return
    if name == "RANK" and is_everywhere("SLURM_LOCALID"):
        raise WrongAnswer(
            f"layout {layout!r}: RANK counts on one host only, so two hosts both have a rank 0."
        )
    if name == "LOCAL_RANK" and is_everywhere("SLURM_PROCID"):
        raise WrongAnswer(
            f"layout {layout!r}: LOCAL_RANK is the task's number in the whole job. It chooses a "
            "GPU of *this* host."
        )
    task = next(i for i, slurm in enumerate(told) if made[i][name] != slurm.get(_DIRECT[name]))
    where = f"layout {layout!r}, task {task}: {name} is {made[task][name]}"
    if name == "WORLD_SIZE":
        raise WrongAnswer(f"{where}. How many tasks has the job?")
    raise WrongAnswer(
        f"{where}, and should be what Slurm says itself. A formula holds in one layout only: "
        "tasks may be dealt out in turn, or unevenly."
    )


def _judge_meeting(layout: str, got: Made, told: Told) -> None:
    where = f"layout {layout!r}"
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        values = {each[name] for each in got}
        if len(values) > 1:
            raise WrongAnswer(
                f"{where}: {name} differs between tasks ({', '.join(sorted(values))}), and all "
                "must meet at one place."
            )
    address, port = got[0]["MASTER_ADDR"], got[0]["MASTER_PORT"]
    nodes = told[0].get("SLURM_JOB_NODELIST", "")
    if address in ("localhost", "127.0.0.1"):
        raise WrongAnswer(
            f"{where}: MASTER_ADDR is {address}, which means another host on each host."
        )
    if address == nodes != _first_host(nodes):
        raise WrongAnswer(
            f"{where}: MASTER_ADDR is the whole list {nodes}. One host of it is wanted."
        )
    if address != _first_host(nodes):
        raise WrongAnswer(
            f"{where}: MASTER_ADDR is {shown(address)}; the first host of {nodes} is another."
        )
    if not (port.isdecimal() and len(port) <= 5 and 1024 <= int(port) <= 65535):
        raise WrongAnswer(
            f"{where}: MASTER_PORT is {shown(port)}, and a port is 1024 to 65535 for a user's job. "
            "A job's number alone may be too large: port_of makes a port of it."
        )


def _first_host(nodes: str) -> str:
    """The first host of a SLURM_JOB_NODELIST."""
    name, bracket, rest = nodes.split(",")[0].partition("[")
    return name + rest.split("]")[0].split("-")[0] if bracket else name


@exercise("9.3", one_of("127.0.0.1", "172.17.0.1", "10.20.0.11"))
def address_for_everybody(address: str) -> str:
    """The network that both hosts are in."""
    if address == "127.0.0.1":
        raise WrongAnswer("on node-b that is node-b. A loopback address never leaves its host.")
    if address == "172.17.0.1":
        raise WrongAnswer(
            "node-b has this address, too: it is that of a network inside each host, for its "
            "containers. Which network do both have in common, with an address each?"
        )
    return (
        "right: both hosts are in 10.20.0.0/24, each with an address of its own. The interface to "
        "name, if one must be named, is then eth0."
    )


_STORE = "the store's port is shut"
_OWN = "the ranks' own ports are shut"
_LOOPBACK = "MASTER_ADDR is a loopback address"
_NO_RANK_0 = "rank 0 does not run"


@exercise("9.4", one_of(_STORE, _OWN, _LOOPBACK, _NO_RANK_0))
def what_is_shut(answer: str) -> str:
    """The store answers on its own host, and not to the other."""
    if answer == _OWN:
        raise WrongAnswer(
            "rank 1 has not come that far: it still waits in the store's stage. With the ranks' "
            "own ports shut, all four would be in process-group."
        )
    if answer == _LOOPBACK:
        raise WrongAnswer(
            "198.51.100.1 is not a loopback address. And a wrong port answers 'connection refused' "
            "at once. Here nothing answers at all."
        )
    if answer == _NO_RANK_0:
        raise WrongAnswer("rank 0 waits in the store, which it hosts; it is open to rank 0 itself.")
    return (
        "right. The same address and port, open from the same host and silent from the other: "
        "what lies between drops it. No answer is a firewall or a missing route; 'refused' is a "
        "host that was reached."
    )


@exercise("9.5", two("(batch, learning rate)", number, number))
def batch_and_learning_rate(answer: tuple[float, float]) -> str:
    """16 ranks with 64 samples each, and four times the rate."""
    batch, rate = answer
    if batch == 64:
        raise WrongAnswer("64 samples are one rank's. The effective batch is that of all ranks.")
    if batch == 256:
        raise WrongAnswer("256 is the effective batch of the old job, with 4 ranks.")
    if batch != 16 * 64:
        raise WrongAnswer("the effective batch is the samples of a step, over all 16 ranks.")
    if near(rate, 0.8):
        return (
            "right: 1,024 and 0.8. Or 16 samples per rank, and nothing else changes: the effective "
            "batch is 256 again."
        )
    if near(rate, 0.2):
        raise WrongAnswer(
            "the batch is right. With the old rate, what do a quarter of the steps do?"
        )
    if near(rate, 0.05):
        raise WrongAnswer(
            "the batch is right. The rate grows with it: fewer steps, each goes farther."
        )
    if near(rate, 0.4):
        raise WrongAnswer(
            "the batch is right. The square root is another rule: this one is linear."
        )
    raise WrongAnswer(
        "the batch is right. By which factor has it grown? The rate grows by the same."
    )
