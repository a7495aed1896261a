"""Rules about devices: two ranks on one GPU, another backend's, DataParallel in place of DDP."""

from __future__ import annotations

from collections.abc import Iterator

from ddp_notebook.diagnosis.context import Context
from ddp_notebook.diagnosis.majority import by_ranks
from ddp_notebook.diagnosis.training.replicas import differing, some
from ddp_notebook.model import (
    Category,
    Collectives,
    Finding,
    ParallelFacts,
    RunFacts,
    in_brackets,
    name_ranks,
)


def shared_gpus(context: Context) -> Iterator[Finding]:
    """Ranks on one GPU while another is free."""
    hosts: dict[str, dict[int, RunFacts]] = {}
    for rank, run in sorted(context.facts.items()):
        if run.gpu and any(replica.device.startswith("cuda") for replica in run.replicas):
            hosts.setdefault(run.host, {})[rank] = run
    for of in hosts.values():
        used = {run.gpu for run in of.values()}
        if len(used) < len(of) and max(run.gpus for run in of.values()) > len(used):
            yield _shared(of)


def _shared(of: dict[int, RunFacts]) -> Finding:
    first: dict[str, int] = {}
    for rank, run in of.items():
        first.setdefault(run.gpu, rank)
    late = tuple(rank for rank, run in of.items() if first[run.gpu] != rank)
    return Finding(
        Category.GPU_MAPPING,
        late,
        f"trains on the GPU of {name_ranks(sorted({first[of[r].gpu] for r in late}))}, while "
        "other GPUs are free",
        'Call torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) before anything on a GPU.',
        evidence=tuple(f"rank {r}: {e.replicas[0].device}, {e.gpu}" for r, e in of.items()),
    )


def backends(context: Context) -> Iterator[Finding]:
    """Parameters on a device that the group's backend is not for."""
    gpus = [run.gpu for run in context.facts.values() if run.gpu]
    for model in context.models.values():
        ranks = tuple(
            rank
            for rank, replica in model.of.items()
            if (replica.device.startswith("cuda") and replica.backend == "gloo")
            or (replica.device == "cpu" and replica.backend == "nccl")
        )
        # NCCL wants a GPU of its own for each rank: without that gloo is the right choice.
        if ranks and (model.first.device == "cpu" or len(set(gpus)) == len(context.facts)):
            each = model.of[ranks[0]]
            right = "nccl" if each.device.startswith("cuda") else "gloo"
            yield Finding(
                Category.BACKEND_DEVICE_MISMATCH,
                ranks,
                f"{model.title} is on {each.device}, and its gradients go through {each.backend}",
                f'Give init_process_group backend="{right}".',
                evidence=tuple(
                    f"rank {r}: {model.of[r].device}, {model.of[r].backend}" for r in ranks
                ),
            )


def data_parallel(context: Context) -> Iterator[Finding]:
    """Several ranks train a model each: they differ by now, or nothing was ever exchanged."""
    facts = context.facts
    for key in dict.fromkeys(model.key for one in facts.values() for model in one.parallels):
        of = {
            rank: model
            for rank in sorted(facts)
            for model in facts[rank].parallels
            if model.key == key
        }
        names = differing({rank: model.parameters for rank, model in of.items()})
        if len(of) > 1 and (names or not _exchanged(context.collectives)):
            yield _alone(of, names)


def _exchanged(collectives: Collectives) -> bool:
    """True when ranks sent each other more than a number: it may have been gradients."""
    return any(record.numel > 1 for records in collectives.of.values() for record in records)


def _alone(of: dict[int, ParallelFacts], names: tuple[str, ...]) -> Finding:
    first = of[min(of)]
    at = in_brackets(first.place)
    does = (
        f"it spreads each batch of its own process over {first.devices} GPUs"
        if first.devices
        else "on CPUs it only calls the module"
    )
    apart = (f"not the same on {name_ranks(of)}: {some(names)}",) if names else ()
    return Finding(
        Category.DDP_BYPASS,
        tuple(of),
        f"{first.type} is trained with torch.nn.DataParallel, which knows nothing of the other "
        f"ranks: {does}, and no gradient is reduced{at}",
        "Wrap the model in torch.nn.parallel.DistributedDataParallel on every rank: each trains on "
        "its own part of the batch, and the gradients are averaged.",
        evidence=(*by_ranks({r: _steps(e.steps) for r, e in of.items()}), *apart),
    )


def _steps(count: int) -> str:
    return f"{count} step{'' if count == 1 else 's'} with DataParallel"
