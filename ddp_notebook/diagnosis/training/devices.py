"""Rules about devices: two ranks on one GPU, a backend for another device."""

from __future__ import annotations

from collections.abc import Iterator

from ddp_notebook.diagnosis.context import Context
from ddp_notebook.model import Category, Finding, RunFacts, name_ranks


def shared_gpus(context: Context) -> Iterator[Finding]:
    """Ranks on one GPU while another is free."""
    hosts: dict[str, dict[int, RunFacts]] = {}
    for rank, each in sorted(context.facts.items()):
        if each.gpu and any(replica.device.startswith("cuda") for replica in each.replicas):
            hosts.setdefault(each.host, {})[rank] = each
    for of in hosts.values():
        used = {each.gpu for each in of.values()}
        if len(used) < len(of) and max(each.gpus for each in of.values()) > len(used):
            yield _shared(of)


def _shared(of: dict[int, RunFacts]) -> Finding:
    first: dict[str, int] = {}
    for rank, each in of.items():
        first.setdefault(each.gpu, rank)
    late = tuple(rank for rank, each in of.items() if first[each.gpu] != rank)
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
    gpus = [each.gpu for each in context.facts.values() if each.gpu]
    for model in context.models.values():
        ranks = tuple(
            rank
            for rank, each in model.of.items()
            if (each.device.startswith("cuda") and each.backend == "gloo")
            or (each.device == "cpu" and each.backend == "nccl")
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
