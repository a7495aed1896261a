"""Cells that train, and are silently wrong or hang.

`WRONG` and `HANGS` have the category of the mistake; `WRONG` also the ranks that make it.
"""

from __future__ import annotations

NET = """
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
    "DataParallel instead of DistributedDataParallel": (
        "ddp-bypass",
        BOTH,
        """
        model = nn.DataParallel(nn.Linear(4, 2))
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            step(model, opt)
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
        SECOND,
        """
        opt = torch.optim.Adam(net.parameters(), lr=1e-3 if rank == 0 else 3e-3)
        for _ in range(3):
            step(opt=opt)
        """,
    ),
    "a schedule by the loss of each rank": (
        "replica-divergence",
        SECOND,
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
        SECOND,
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
    "around the wrapper on one rank": (
        "ddp-bypass",
        """
        for i in range(3):
            step(net.module if rank == 1 else net)
        """,
    ),
}
