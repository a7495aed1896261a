"""Cells that train, and are silently wrong or hang.

`WRONG` and `HANGS` have the category of the mistake; `WRONG` also the ranks that make it.
"""

from __future__ import annotations

NET = """
import contextlib
from torch import nn
torch.manual_seed(0)
net = DDP(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
torch.manual_seed(100 + rank)
def batch():
    return torch.randn(3, 4)
def step(model=None, opt=opt):
    opt.zero_grad()
    (net if model is None else model)(batch()).pow(2).mean().backward()
    opt.step()
"""
BOTH, SECOND = (0, 1), (1,)

WRONG = {
    "parameters that the last of several steps does not use": (
        "unused-params",
        BOTH,
        """
import gc
class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
    def forward(self, x, both):
        return self.b(self.a(x)) if both else self.a(x)
net = DDP(Toy(), bucket_cap_mb=0.00001)
gc.collect()  # the model before: buckets are counted where there is one
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for i in range(8):
    opt.zero_grad()
    net(batch(), i < 7).pow(2).mean().backward()
    opt.step()
""",
    ),
    "gradients of micro-batches that are clipped before they are averaged": (
        "local-statistic",
        BOTH,
        """
for i in range(24):
    last = i % 3 == 2
    with contextlib.nullcontext() if last else net.no_sync():
        ((net(batch() * (1 + 4 * rank)) - 9).pow(2).mean() / 3).backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
    if last:
        opt.step()
        opt.zero_grad()
""",
    ),
    "data split at random, by another seed on each rank, under a DistributedSampler": (
        "sampler-misuse",
        BOTH,
        """
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split
train, held_out = random_split(TensorDataset(torch.arange(160.).view(40, 4)), [32, 8])
for (x,) in DataLoader(train, 4, sampler=DistributedSampler(train)):
    opt.zero_grad()
    net(x).pow(2).mean().backward()
    opt.step()
""",
    ),
    "a sampler with weights and the same seed on all ranks": (
        "sampler-misuse",
        BOTH,
        """
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler
data, drawn = TensorDataset(torch.randn(40, 4, generator=torch.Generator())), torch.Generator()
sampler = WeightedRandomSampler([1.] * 40, 24, generator=drawn.manual_seed(3))
for (x,) in DataLoader(data, 4, sampler=sampler):
    opt.zero_grad()
    net(x).pow(2).mean().backward()
    opt.step()
""",
    ),
    "parameters that are sent while the next step changes them": (
        "async-misuse",
        BOTH,
        """
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
for p in model.parameters(): dist.broadcast(p.data, 0)
owner = {p: i % 2 for i, p in enumerate(model.parameters())}
own = torch.optim.SGD([p for p in owner if owner[p] == rank], lr=0.1)
for _ in range(4):
    model.zero_grad()
    model(batch()).pow(2).mean().backward()
    for p in owner:
        dist.all_reduce(p.grad)
        p.grad /= 2
    own.step()
    for p in owner: dist.broadcast(p.data, owner[p], async_op=True)
""",
    ),
    "weights that are no longer tied once a state is loaded": (
        "weight-tying-lost",
        BOTH,
        """
        class Tied(nn.Module):
            def __init__(self):
                super().__init__()
                self.first = nn.Linear(4, 4, bias=False)
                self.last = nn.Linear(4, 4, bias=False)
                self.last.weight = self.first.weight
            def forward(self, x):
                return self.last(self.first(x))
        torch.manual_seed(0)
        plain = Tied()
        state = {name: each.clone() for name, each in plain.state_dict().items()}
        plain.load_state_dict(state, assign=True)
        tied = DDP(plain)
        tied_opt = torch.optim.SGD(tied.parameters(), lr=0.1)
        torch.manual_seed(rank)
        for _ in range(3):
            step(tied, tied_opt)
        """,
    ),
    "a tensor changed while it is broadcast": (
        "async-misuse",
        BOTH,
        """
        def spread(x):
            handle = dist.broadcast(x, 0, async_op=True)
            x.add_(1)
            return x
        for _ in range(3):
            spread(torch.ones(50))
        """,
    ),
    "gradients that the optimizer uses while they are reduced": (
        "async-misuse",
        BOTH,
        """
        torch.manual_seed(0)
        plain = nn.Linear(4, 2)
        opt = torch.optim.SGD(plain.parameters(), lr=0.1)
        for _ in range(3):
            plain(batch()).sum().backward()
            handles = [dist.all_reduce(p.grad, async_op=True) for p in plain.parameters()]
            opt.step()
            opt.zero_grad()
            [handle.wait() for handle in handles]
        """,
    ),
    "results of functional collectives, read as they are": (
        "async-misuse",
        BOTH,
        """
        name = dist.group.WORLD.group_name
        for _ in range(2):
            torch.ops._c10d_functional.all_reduce(torch.ones(4), "sum", name) / 2
        """,
    ),
    "gradient sync of a sharded model one too early": (
        "no-sync-misuse",
        BOTH,
        """
        from torch.distributed.fsdp import fully_shard
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        fully_shard(model[0]), fully_shard(model)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for i in range(8):
            model.set_requires_gradient_sync(i % 4 == 2)
            model(batch()).pow(2).mean().backward()
            if i % 4 == 3:
                opt.step()
                opt.zero_grad()
        """,
    ),
    "a sharded model clipped by the norm of a shard": (
        "local-statistic",
        BOTH,
        """
        from torch.distributed.fsdp import fully_shard
        torch.manual_seed(0)
        model = fully_shard(nn.Linear(4, 8))
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            opt.zero_grad()
            model(batch() * torch.arange(1, 5)).pow(3).sum().backward()
            shards = [p.grad.to_local() for p in model.parameters()]
            norm = sum(s.pow(2).sum() for s in shards).sqrt()
            [s.mul_(0.1 / norm) for s in shards]
            opt.step()
        """,
    ),
    "other samples on each rank of a tensor-parallel group": (
        "replica-input-mismatch",
        BOTH,
        """
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
        from torch.distributed.tensor.parallel import parallelize_module
        tp = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        torch.manual_seed(0)
        model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        parallelize_module(model, tp, {"1": ColwiseParallel(), "3": RowwiseParallel()})
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(rank)
        for _ in range(4):
            step(model, opt)
        """,
    ),
    "every rank evaluates with its own statistics": (
        "buffer-sync",
        BOTH,
        """
        body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        net = DDP(body, broadcast_buffers=False)
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(3):
            step(net, opt)
        net.eval()
        with torch.no_grad():
            dist.all_reduce(net(torch.ones(3, 4)).sum())
        """,
    ),
    "one rank reports its own part": (
        "metric-misaggregation",
        BOTH,
        """
        for _ in range(2):
            net.train()
            step()
            net.eval()
            with torch.no_grad():
                value = net(batch()).pow(2).mean().item()
            if rank == 0:
                print("loss of the test set", value)
        """,
    ),
    "the same noise on every rank": (
        "rng-mismatch",
        BOTH,
        """
        data = torch.randn(30, 4)
        torch.manual_seed(7)
        for x in data.split(3):
            opt.zero_grad()
            net(x + torch.randn_like(x)).pow(2).mean().backward()
            opt.step()
        """,
    ),
    "autocast on one rank": (
        "numerics-mismatch",
        SECOND,
        """
        for _ in range(2):
            opt.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=rank == 1):
                loss = net(batch()).float().pow(2).mean()
            loss.backward()
            opt.step()
        """,
    ),
    "a stream that gives every rank the same": (
        "sampler-misuse",
        BOTH,
        """
        class Lines(torch.utils.data.IterableDataset):
            def __iter__(self):
                own = torch.Generator().manual_seed(3)
                yield from (torch.randn(4, generator=own) for _ in range(8))
        for x in torch.utils.data.DataLoader(Lines(), batch_size=2):
            opt.zero_grad()
            net(x).pow(2).mean().backward()
            opt.step()
        """,
    ),
    "accumulation one too early": (
        "no-sync-misuse",
        BOTH,
        """
        import contextlib
        for i in range(8):
            with contextlib.nullcontext() if i % 4 == 2 else net.no_sync():
                net(batch()).pow(2).mean().backward()
            if i % 4 == 3:
                opt.step()
                opt.zero_grad()
        """,
    ),
    "one of two losses around the wrapper": (
        "ddp-bypass",
        BOTH,
        """
        for _ in range(3):
            opt.zero_grad()
            net(batch()).pow(2).mean().backward()
            net.module(batch()).abs().mean().backward()
            opt.step()
        """,
    ),
    "a method of the module inside": (
        "ddp-bypass",
        BOTH,
        """
        class Policy(nn.Module):
            def __init__(self):
                super().__init__()
                self.body = nn.Linear(4, 2)
            def log_prob(self, x):
                return torch.log_softmax(self.body(x), -1)
        net = DDP(Policy())
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(4):
            opt.zero_grad()
            net.module.log_prob(batch())[:, 0].mean().backward()
            opt.step()
        """,
    ),
    "a head replaced after the optimizer was made": (
        "optimizer-detached",
        BOTH,
        """
        body = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 9))
        opt = torch.optim.SGD(body.parameters(), lr=0.1)
        torch.manual_seed(0)
        body[1] = nn.Linear(8, 2)
        net = DDP(body)
        for _ in range(4): step(net, opt)
        """,
    ),
    "the wrapper left by mistake, the same data everywhere": (
        "ddp-bypass",
        BOTH,
        """
        torch.manual_seed(5)
        inner = net.module
        for _ in range(3):
            step(inner)
        """,
    ),
    "unfrozen after wrapping": (
        "params-outside-ddp",
        BOTH,
        """
        body = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
        body[0].requires_grad_(False)
        net = DDP(body)
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        step(opt=opt)
        body[0].requires_grad_(True)
        step(opt=opt)
        """,
    ),
    "unfrozen after wrapping, by an optimizer that is gone": (
        "params-outside-ddp",
        BOTH,
        """
        body = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
        body[0].requires_grad_(False)
        net = DDP(body)
        def phase(opt):
            step(opt=opt)
            step(opt=opt)
        phase(torch.optim.SGD(body[1].parameters(), lr=0.1))
        body[0].requires_grad_(True)
        phase(torch.optim.SGD(body.parameters(), lr=0.1))
        """,
    ),
    "a head added after wrapping": (
        "params-outside-ddp",
        BOTH,
        """
        net.module.append(nn.Linear(2, 2))
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(2):
            step(opt=opt)
        """,
    ),
    "a loss with parameters of its own": (
        "params-outside-ddp",
        BOTH,
        """
        centre = nn.Parameter(torch.zeros(2))
        opt = torch.optim.SGD([*net.parameters(), centre], lr=0.1)
        for _ in range(2):
            opt.zero_grad()
            (net(batch()) - centre).pow(2).mean().backward()
            opt.step()
        """,
    ),
    "another learning rate on one rank": (
        "replica-divergence",
        BOTH,
        """
        opt = torch.optim.Adam(net.parameters(), lr=1e-3 if rank == 0 else 3e-3)
        for _ in range(3):
            step(opt=opt)
        """,
    ),
    "a schedule by the loss of each rank": (
        "replica-divergence",
        BOTH,
        """
        plan = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=0)
        for i in range(4):
            step()
            plan.step(1.0 if rank == 0 and i == 0 else i * rank)
        """,
    ),
    "one rank loads other weights after wrapping": (
        "replica-divergence",
        BOTH,
        """
        if rank == 1:
            with torch.no_grad():
                net.module[0].weight.add_(0.1)
        for _ in range(3):
            step()
        """,
    ),
    "one rank loads a state after wrapping": (
        "checkpoint-misuse",
        BOTH,
        """
        state = {name: value + 0.1 for name, value in net.state_dict().items()}
        if rank == 0:
            net.load_state_dict(state)
        for _ in range(3):
            step()
        """,
    ),
    "one rank loads a part of the model after wrapping": (
        "checkpoint-misuse",
        BOTH,
        """
        state = {name: value + 0.1 for name, value in net.module[0].state_dict().items()}
        if rank == 0:
            net.module[0].load_state_dict(state)
        for _ in range(3):
            step()
        """,
    ),
    "one rank goes on with the moments of its optimizer": (
        "checkpoint-misuse",
        BOTH,
        """
        import copy
        opt = torch.optim.AdamW(net.parameters(), lr=0.01)
        for _ in range(3):
            step(opt=opt)
        states = copy.deepcopy(opt.state_dict())
        opt = torch.optim.AdamW(net.parameters(), lr=0.01)
        if rank == 0:
            opt.load_state_dict(states)
        for _ in range(3):
            step(opt=opt)
        """,
    ),
    "an optimizer of the model that was copied": (
        "optimizer-detached",
        BOTH,
        """
        import copy
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
        opt = torch.optim.Adam(model.parameters())
        other = DDP(copy.deepcopy(model))
        for _ in range(3):
            opt.zero_grad()
            other(batch()).pow(2).mean().backward()
            opt.step()
        """,
    ),
    "a loss that is not a number on one rank": (
        "nan-on-one-rank",
        SECOND,
        """
        for i in range(4):
            opt.zero_grad()
            loss = net(batch()).pow(2).mean()
            (loss * (float("nan") if rank == 1 and i == 1 else 1.0)).backward()
            opt.step()
        """,
    ),
    "a gradient that is not a number on one rank": (
        "nan-on-one-rank",
        SECOND,
        """
        for i in range(4):
            opt.zero_grad()
            x = batch() * (0.0 if rank == 1 and i == 2 else 1.0)
            out = net.module[0].bias if False else net(x)
            (out - out.detach()).norm().sqrt().backward() if i == 2 and rank == 1 else (
                out.pow(2).mean().backward())
            opt.step()
        """,
    ),
    "other seeds of the sampler": (
        "sampler-misuse",
        BOTH,
        """
        from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
        data = TensorDataset(torch.arange(64.0).view(16, 4))
        sampler = DistributedSampler(data, seed=rank)
        for (x,) in DataLoader(data, batch_size=4, sampler=sampler):
            opt.zero_grad(); net(x).mean().backward(); opt.step()
        """,
    ),
    "the shard of rank 0 on every rank": (
        "sampler-misuse",
        SECOND,
        """
        from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
        data = TensorDataset(torch.arange(64.0).view(16, 4))
        sampler = DistributedSampler(data, num_replicas=2, rank=0)
        for (x,) in DataLoader(data, batch_size=4, sampler=sampler):
            opt.zero_grad(); net(x).mean().backward(); opt.step()
        """,
    ),
    "a sampler of one": (
        "sampler-misuse",
        BOTH,
        """
        from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
        data = TensorDataset(torch.arange(64.0).view(16, 4))
        sampler = DistributedSampler(data, num_replicas=1, rank=0)
        for (x,) in DataLoader(data, batch_size=4, sampler=sampler):
            opt.zero_grad(); net(x).mean().backward(); opt.step()
        """,
    ),
    "no sampler at all": (
        "sampler-misuse",
        BOTH,
        """
        from torch.utils.data import DataLoader, TensorDataset
        data = TensorDataset(torch.arange(64.0).view(16, 4))
        for (x,) in DataLoader(data, batch_size=4):
            opt.zero_grad(); net(x).mean().backward(); opt.step()
        """,
    ),
    "a buffer that nobody sends": (
        "buffer-sync",
        BOTH,
        """
        class Book(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(4, 2)
                self.register_buffer("centre", torch.zeros(2))
            def forward(self, x):
                out = self.layer(x)
                self.centre.lerp_(out.detach().mean(0), 0.1)
                return out
        net = DDP(Book(), broadcast_buffers=False)
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(2):
            opt.zero_grad(); net(batch()).pow(2).mean().backward(); opt.step()
        """,
    ),
    "buffers in another order": (
        "buffer-sync",
        BOTH,
        """
        class Two(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(4, 2)
                for name in ("a", "b") if rank == 0 else ("b", "a"):
                    self.register_buffer(name, torch.ones(2) * (1 if name == "a" else 2))
            def forward(self, x):
                return self.layer(x) * self.a
        net = DDP(Two())
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(2):
            opt.zero_grad(); net(batch()).pow(2).mean().backward(); opt.step()
        """,
    ),
    "a skipped step under a hook that reduces everything": (
        "replica-divergence",
        SECOND,
        """
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
        net.register_comm_hook(None, default_hooks.fp16_compress_hook)
        for i in range(3):
            opt.zero_grad()
            net(batch()).pow(2).mean().backward()
            if not (rank == 1 and i == 1):
                opt.step()
        """,
    ),
    "a head that is replaced between two stages, and an optimizer that keeps the old one": (
        "optimizer-detached",
        BOTH,
        """
        class Tagger(nn.Module):
            def __init__(self):
                super().__init__()
                self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 3)
            def forward(self, x):
                return self.head(torch.relu(self.body(x)))
        tagger = Tagger()
        own = torch.optim.AdamW(tagger.parameters(), lr=0.01)
        for outputs in (3, 2):
            tagger.head = nn.Linear(8, outputs) if outputs == 2 else tagger.head
            wrapped = DDP(tagger)
            for _ in range(6):
                loss = wrapped(batch()).pow(2).mean()
                tagger.zero_grad(set_to_none=True)
                loss.backward()
                own.step()
        """,
    ),
}

HANGS = {
    "no_sync on one rank": (
        "no-sync-misuse",
        """
        import contextlib
        for i in range(3):
            opt.zero_grad()
            with net.no_sync() if rank == 1 and i == 1 else contextlib.nullcontext():
                net(batch()).pow(2).mean().backward()
            opt.step()
        """,
    ),
    "a parameter that one rank does not use": (
        "unused-params",
        """
        class Toy(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b = nn.Linear(4, 2), nn.Linear(4, 2)
            def forward(self, x):
                return self.a(x) + (self.b(x) if rank == 0 else 0)
        net = DDP(Toy())
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        opt.zero_grad(); net(batch()).pow(2).mean().backward(); opt.step()
        """,
    ),
    "a parameter that one rank does not use, in a loop": (
        "unused-params",
        """
        class Toy(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b = nn.Linear(4, 2), nn.Linear(4, 2)
            def forward(self, x):
                return self.a(x) + (self.b(x) if rank == 0 else 0)
        net = DDP(Toy())
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(3):
            opt.zero_grad(); net(batch()).pow(2).mean().backward(); opt.step()
        """,
    ),
    "an error, on the way out of which a barrier is": (
        "exception-on-one-rank",
        """
        def train():
            try:
                if rank == 1:
                    raise ValueError("bad sample")
                dist.recv(torch.zeros(1), 1)
            finally:
                dist.barrier()
        train()
        """,
    ),
    "a thread that raised, and what it was to bring": (
        "undecided",  # of two ranks, either the thread's error or the condition is the cause
        """
        import threading
        def prefetch():
            if rank == 1:
                raise KeyError("shard 7")
        box = []
        loader = threading.Thread(target=lambda: (prefetch(), box.append(batch())), daemon=True)
        loader.start()
        loader.join()
        if box:
            dist.all_reduce(box[0])
        dist.barrier()
        """,
    ),
    "around the wrapper on one rank": (
        "ddp-bypass",
        """
        for i in range(3):
            step(net.module if rank == 1 else net)
        """,
    ),
}
