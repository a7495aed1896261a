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

BY_HAND = """
def averaged(model, opt, loss, tensors=None):
    opt.zero_grad()
    loss.backward()
    for each in model.parameters() if tensors is None else tensors:
        dist.all_reduce(each.grad)
        each.grad /= 2
    opt.step()
"""

BATCHES = """
class Batches:
    def __init__(self, shuffle):
        self.shuffle, self.epoch = shuffle, 0
    def set_epoch(self, epoch):
        self.epoch = epoch
    def __iter__(self):
        g = torch.Generator().manual_seed(self.epoch)
        order = torch.randperm(24, generator=g) if self.shuffle else torch.arange(24)
        yield from order.view(-1, 4)[rank::2].tolist()
    def __len__(self):
        return 3
rows = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
def loader_of(shuffle):
    data = torch.utils.data.TensorDataset(rows)
    return torch.utils.data.DataLoader(data, batch_sampler=Batches(shuffle))
def train_on(loader):
    for (x,) in loader:
        opt.zero_grad()
        net(x).pow(2).mean().backward()
        opt.step()
"""

LOCAL_STEPS = """
torch.manual_seed(0)
own = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
opt = torch.optim.SGD(own.parameters(), lr=0.1)
torch.manual_seed(50 + rank)
def train(averaged):
    averaged = list(averaged)
    for turn in range(4):
        for _ in range(3):
            opt.zero_grad()
            own(torch.randn(6, 4) + 3 * rank).pow(2).mean().backward()
            opt.step()
        for tensor in averaged:
            dist.all_reduce(tensor.data)
            tensor.data /= 2
        own.eval()
        with torch.no_grad():
            total = own(torch.randn(6, 4) + 3 * rank).pow(2).sum()
        dist.all_reduce(total)
        own.train()
"""

WRONG = {
    "heads in a plain dict, which an average over model.parameters() leaves out": (
        "params-outside-ddp",
        BOTH,
        BY_HAND
        + """
class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(4, 8)
        self.heads = {name: nn.Linear(8, 2) for name in ("one", "two")}
    def forward(self, x):
        return [head(torch.relu(self.trunk(x))) for head in self.heads.values()]
torch.manual_seed(0)
own = Heads()
groups = [{"params": part.parameters()} for part in (own.trunk, *own.heads.values())]
opt = torch.optim.SGD(groups, lr=0.1)
torch.manual_seed(50 + rank)
for _ in range(6):
    averaged(own, opt, sum(out.pow(2).mean() for out in own(batch())))
""",
    ),
    "parameters that are averaged after some steps each, without the statistics of batches": (
        "buffer-sync",
        BOTH,
        LOCAL_STEPS
        + """
train(own.parameters())
""",
    ),
    "a discriminator that steps with what the generator's backward left in it": (
        "stale-gradients",
        BOTH,
        """
judge = DDP(nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1)))
opt_judge = torch.optim.SGD(judge.parameters(), lr=0.1)
for i in range(6):
    opt.zero_grad()
    opt_judge.zero_grad()
    nn.functional.softplus(-judge(net(batch()))).mean().backward()
    opt.step()
    with torch.no_grad():
        fake = net(batch())
    real = torch.randn(3, 2) + 1
    (nn.functional.softplus(judge(fake)) + nn.functional.softplus(-judge(real))).mean().backward()
    opt_judge.step()
del judge, opt_judge
""",
    ),
    "a sampler of batches whose set_epoch is looked for at the loader's sampler": (
        "sampler-misuse",
        BOTH,
        BATCHES
        + """
loader = loader_of(shuffle=True)
for epoch in range(3):
    if hasattr(loader.sampler, "set_epoch"):
        loader.sampler.set_epoch(epoch)
    train_on(loader)
""",
    ),
    "a rank that leaves its model in evaluation mode after its evaluation, late in the run": (
        "numerics-mismatch",
        (0,),
        """
net = DDP(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2)))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for i in range(24):
    step(net, opt)
    if i == 15 and rank == 0:
        net.eval()
        with torch.no_grad(): net.module(batch())
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
    "an average of a model that was copied before DDP sent rank 0's values": (
        "replica-divergence",
        BOTH,
        """
import copy
torch.manual_seed(7 + rank)
plain = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
shadow = copy.deepcopy(plain).requires_grad_(False)
model = DDP(plain)
opt = torch.optim.SGD(model.parameters(), lr=0.05)
for i in range(16):
    step(model, opt)
    with torch.no_grad():
        for s, p in zip(shadow.parameters(), plain.parameters()): s.lerp_(p, 0.05)
        if i % 4 == 3: shadow(batch())
""",
    ),
    "a stream of which ranks read parts that overlap": (
        "sampler-misuse",
        BOTH,
        """
from torch.utils.data import DataLoader, IterableDataset
class Rows(IterableDataset):
    def __iter__(self):
        rows = torch.randn(24, 4, generator=torch.Generator().manual_seed(3))
        yield from rows[rank * 8 : rank * 8 + 16]
for x in DataLoader(Rows(), batch_size=2):
    opt.zero_grad()
    net(x).pow(2).mean().backward()
    opt.step()
""",
    ),
    "a GradScaler that skips a rank's step, though the ranks average their gradients": (
        "replica-divergence",
        BOTH,
        """
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
torch.manual_seed(100 + rank)
for i in range(24):
    x = batch()
    if rank == 1 and i == 12: x[0, 0] = float("inf")
    opt.zero_grad()
    scaler.scale(model(x).pow(2).mean()).backward()
    scaler.unscale_(opt)
    for p in model.parameters():
        p.grad = torch.nan_to_num(p.grad, 0.0, 0.0, 0.0)
        dist.all_reduce(p.grad)
        p.grad /= 2
    scaler.step(opt)
    scaler.update()
""",
    ),
    "experts of each rank's own, and a router that is left out of the averages with them": (
        "replica-divergence",
        BOTH,
        """
import torch.distributed.nn.functional as functional
class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inp, self.gate = nn.Linear(4, 8), nn.Linear(8, 8)
        torch.manual_seed(50 + rank)
        self.expert = nn.Linear(8, 8)
        torch.manual_seed(1)
        self.out = nn.Linear(8, 2)
    def forward(self, x):
        h = self.inp(x)
        h = h * self.gate(h).softmax(-1)
        got = functional.all_to_all_single(torch.empty_like(h), h)
        return self.out(functional.all_to_all_single(torch.empty_like(h), self.expert(got)))
model = Experts()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(100 + rank)
for _ in range(8):
    opt.zero_grad()
    (model(torch.randn(4, 4)) - 1).pow(2).mean().backward()
    for name, p in model.named_parameters():
        if not name.startswith(("gate", "expert")): dist.all_reduce(p.grad)
        p.grad /= 2
    opt.step()
""",
    ),
    "a running loss that is summed over the ranks in place, and added to and summed again": (
        "metric-misaggregation",
        BOTH,
        """
running = torch.zeros(1)
for i in range(6):
    opt.zero_grad()
    loss = net(batch()).pow(2).mean()
    loss.backward()
    opt.step()
    running += loss.detach()
    if i % 2 == 1:
        dist.all_reduce(running)
        print(running.item() / (i + 1))
""",
    ),
    "a meter, made once, whose sum over the ranks is taken in place after each epoch": (
        "metric-misaggregation",
        BOTH,
        """
class Meter:
    def __init__(self):
        self.total = torch.zeros(2)
    def update(self, loss, n):
        self.total += torch.tensor([loss * n, n])
    def value(self):
        dist.all_reduce(self.total)
        return (self.total[0] / self.total[1]).item()
def main():
    meter = Meter()
    for epoch in range(3):
        for _ in range(2):
            opt.zero_grad()
            loss = net(batch()).pow(2).mean()
            loss.backward()
            opt.step()
            meter.update(loss.item(), 3)
        print(meter.value())
main()
""",
    ),
    "nothing but an evaluation: the mean of the ranks' means, which have unequal parts": (
        "metric-misaggregation",
        BOTH,
        """
mine = torch.ones(4 if rank else 20, 4)
net.eval()
right = 0
with torch.no_grad():
    for x in mine.split(2): right += (net(x)[:, 0] > 0).sum().item()
share = torch.tensor(right / len(mine))
dist.all_reduce(share)
print(share / dist.get_world_size())
""",
    ),
    "nothing but an evaluation, of a model without DDP that one rank alone has loaded": (
        "checkpoint-misuse",
        BOTH,
        """
def evaluate(rows):
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    if rank == 0: model.load_state_dict(net.module[0:3].state_dict())
    model.eval()
    with torch.no_grad(): right = (model(rows)[:, 0] > 0).sum()
    dist.all_reduce(right)
    return right
del net, opt
net = type("Loaded", (), {"module": nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))})
evaluate(torch.randn(8, 4))
""",
    ),
    "nothing but an evaluation, of a model that is gone at its end: samples counted twice": (
        "eval-padding",
        BOTH,
        """
def evaluate():
    data = TensorDataset(torch.arange(20.).view(5, 4))
    model = DDP(nn.Linear(4, 2))
    right = count = 0
    with torch.inference_mode():
        for x, in DataLoader(data, 2, sampler=DistributedSampler(data, shuffle=False)):
            right += (model(x)[:, 0] > 0).sum().item()
            count += len(x)
    t = torch.tensor([right, count])
    dist.all_reduce(t)
    return t[0] / t[1]
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
print(evaluate())
""",
    ),
    "gradients averaged by hand, and statistics of batches that nothing sends": (
        "buffer-sync",
        BOTH,
        BY_HAND
        + """
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(rank)
for _ in range(2):
    model.train()
    for _ in range(4): averaged(model, sgd, model(torch.randn(6, 4) + rank).pow(2).mean())
    model.eval()
    with torch.no_grad(): model(torch.ones(2, 4))
""",
    ),
    "layers that are unfrozen, and are in no list of what is averaged": (
        "replica-divergence",
        BOTH,
        BY_HAND
        + """
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
model[0].requires_grad_(False)
trained = [each for each in model.parameters() if each.requires_grad]
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(rank)
for i in range(20):
    if i == 9: model[0].requires_grad_(True)
    averaged(model, sgd, model(torch.randn(6, 4)).pow(2).mean(), trained)
""",
    ),
    "an average, copied before the model was wrapped, that one rank alone updates": (
        "replica-divergence",
        (0,),
        """
        import copy
        model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
        for each in model.parameters(): dist.broadcast(each.data, 0)
        average = copy.deepcopy(model).requires_grad_(False)
        wrapped = DDP(model)
        sgd = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        for _ in range(4):
            step(wrapped, sgd)
            if rank == 0:
                for mine, new in zip(average.parameters(), model.parameters()):
                    mine.lerp_(new.detach(), 0.5)
        error = average(batch()).pow(2).mean()
        dist.all_reduce(error)
        """,
    ),
    "a step that is skipped, and leaves its gradients, with what steps in a function": (
        "stale-gradients",
        BOTH,
        """
def apply():
    opt.step()
    opt.zero_grad()
def train(losses):
    for i, loss in enumerate(losses):
        loss.backward()
        if loss.isnan() or loss > 5:
            continue
        apply()
train(net(torch.full((3, 4), 90. if i == 4 else 1.)).pow(2).mean() for i in range(9))
""",
    ),
    "a sum divided by the targets of all ranks, whose gradients are averaged as well": (
        "loss-scaling",
        BOTH,
        """
from torch.nn.functional import cross_entropy
for i in range(6):
    targets = torch.ones(3 + i + 2 * rank, dtype=torch.long)
    count = torch.tensor(float(len(targets)))
    dist.all_reduce(count)
    opt.zero_grad()
    logits = net(torch.randn(len(targets), 4))
    (cross_entropy(logits, targets, reduction="sum") / count).backward()
    opt.step()
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
    "numbers that a model draws and keeps as no buffer": (
        "rng-mismatch",
        BOTH,
        """
class Waves(nn.Module):
    def __init__(self):
        super().__init__()
        self.waves = 3 * torch.randn(4, 8)
        self.last = nn.Linear(8, 2)
    def forward(self, x):
        return self.last((x @ self.waves).sin())
waves = DDP(Waves())
waves_opt = torch.optim.SGD(waves.parameters(), lr=0.1)
for _ in range(4): step(waves, waves_opt)
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
    "a step that is skipped, and leaves its gradients": (
        "stale-gradients",
        BOTH,
        """
        for i in range(12):
            loss = net(batch() * (50 if i % 4 == 2 else 1)).pow(2).mean()
            loss.backward()
            large = torch.tensor(float(loss > 4))
            dist.all_reduce(large)
            if large.item() > 0:
                continue
            opt.step()
            opt.zero_grad()
        """,
    ),
    "a communication hook that sums": (
        "loss-scaling",
        BOTH,
        """
        def summed(state, bucket):
            work = dist.all_reduce(bucket.buffer(), async_op=True)
            return work.get_future().then(lambda done: done.value()[0])
        net.register_comm_hook(None, summed)
        for _ in range(4): step()
        """,
    ),
    "an average of the weights that one rank alone updates, used on both": (
        "replica-divergence",
        (0,),
        """
        import copy
        average = copy.deepcopy(net.module).requires_grad_(False)
        for _ in range(4):
            step()
            for mine, new in zip(average.parameters(), net.parameters()):
                if rank == 0: mine.lerp_(new.detach(), 0.5)
        error = average(batch()).pow(2).mean()
        dist.all_reduce(error)
        """,
    ),
    "a gathered result that is read before its handle is waited for": (
        "async-misuse",
        BOTH,
        """
        for _ in range(2): step()
        parts = [torch.zeros(2) for _ in range(2)]
        work = dist.all_gather(parts, torch.ones(2), async_op=True)
        mean = torch.stack(parts).mean(0)
        work.wait()
        """,
    ),
    "accumulated gradients that nobody clears": (
        "stale-gradients",
        BOTH,
        """
        for i in range(10):
            with net.no_sync() if i % 2 == 0 else contextlib.nullcontext():
                (net(batch()).pow(2).mean() / 2).backward()
            if i % 2: opt.step()
        """,
    ),
    "gradients that are added up by hand": (
        "loss-scaling",
        BOTH,
        """
        own = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        for each in own.parameters():
            dist.broadcast(each.data, 0)
        mine = torch.optim.SGD(own.parameters(), lr=0.01)
        for _ in range(5):
            mine.zero_grad()
            own(batch()).pow(2).mean().backward()
            for each in own.parameters():
                dist.all_reduce(each.grad)
            mine.step()
        """,
    ),
    "a result of unequal parts, averaged over the ranks": (
        "metric-misaggregation",
        BOTH,
        """
        for _ in range(2):
            step()
            hits, part = 0, torch.randn(4 if rank else 20, 4)
            with torch.no_grad():
                for x in part.split(4):
                    hits += (net(x).argmax(1) == 0).sum().item()
            share = torch.tensor(hits / len(part))
            dist.all_reduce(share)
            share /= dist.get_world_size()
        """,
    ),
    "samples of the padding that are counted": (
        "eval-padding",
        BOTH,
        """
        from torch.utils.data import DataLoader, DistributedSampler
        data = torch.randn(15, 4)
        loader = DataLoader(data, 4, sampler=DistributedSampler(data, shuffle=False))
        for _ in range(2):
            step()
            count = torch.zeros(2)
            with torch.no_grad():
                for x in loader:
                    count += torch.tensor([(net(x).argmax(1) == 0).sum().item(), len(x)])
            dist.all_reduce(count)
            right, total = count.tolist()
            print(right / total)
        """,
    ),
    "samples of the padding that are gathered": (
        "eval-padding",
        BOTH,
        """
        from torch.utils.data import DataLoader, DistributedSampler
        data = torch.randn(15, 4)
        loader = DataLoader(data, 4, sampler=DistributedSampler(data, shuffle=False))
        def everyone(t):
            parts = [torch.zeros_like(t) for _ in range(2)]
            dist.all_gather(parts, t)
            return torch.stack(parts, 1).flatten()
        for _ in range(2):
            step()
            with torch.no_grad():
                right = torch.cat([net(x).argmax(1) == 0 for x in loader]).float()
            right = everyone(right)
            print(right.mean())
        """,
    ),
    "a parameter that fully_shard leaves out": (
        "params-outside-ddp",
        BOTH,
        """
        from torch.distributed.fsdp import fully_shard
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        fully_shard(model, ignored_params={model[2].bias})
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(rank)
        for _ in range(4):
            model(batch()).pow(2).mean().backward()
            opt.step()
            opt.zero_grad()
        """,
    ),
    "one file that both ranks save": (
        "filesystem",
        BOTH,
        """
        import os, tempfile
        path = os.path.join(tempfile.gettempdir(), f"both-{os.getppid()}.pt")
        for _ in range(2):
            step()
            torch.save(net.state_dict(), path)
        dist.barrier()
        if rank == 0:
            os.remove(path)
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
    "a mean that is read before its handle was waited for": (
        "async-misuse",
        BOTH,
        """
        for _ in range(3):
            step()
            total = torch.ones(50)
            dist.all_reduce(total, async_op=True)
            mean = total[:2] / 2
        dist.barrier()
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
    "a model split by hand, whose parts are not added up in backward": (
        "replica-divergence",
        BOTH,
        """
        class Sum(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                x = x.clone()
                dist.all_reduce(x)
                return x
            @staticmethod
            def backward(ctx, grad):
                return grad
        class Split(nn.Module):
            def __init__(self):
                super().__init__()
                self.norm = nn.LayerNorm(4)
                self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 2, bias=False)
            def forward(self, x):
                x = self.norm(x)
                return x[:, :2] + Sum.apply(self.down(self.up(x).relu()))
        torch.manual_seed(rank)
        model = Split()
        opt = torch.optim.SGD(model.parameters(), lr=0.5)
        torch.manual_seed(7)
        for _ in range(5):
            step(model, opt)
        """,
    ),
    "a sharded model that one rank saves": (
        "checkpoint-misuse",
        (0,),
        """
        import os, tempfile
        from torch.distributed.fsdp import fully_shard
        model = fully_shard(nn.Linear(4, 8))
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            step(model, opt)
        state = model.state_dict()
        if rank == 0:
            path = os.path.join(tempfile.mkdtemp(), "all.pt")
            torch.save({"model": state}, path)
            os.remove(path), os.rmdir(os.path.dirname(path))
        """,
    ),
    "gradients divided by the world size again": (
        "loss-scaling",
        BOTH,
        """
        for _ in range(6):
            opt.zero_grad()
            net(batch()).pow(2).mean().backward()
            for p in net.parameters():
                p.grad /= dist.get_world_size()
            opt.step()
        """,
    ),
    "gradients never cleared": (
        "stale-gradients",
        BOTH,
        """
        for _ in range(6):
            net(batch()).pow(2).mean().backward()
            opt.step()
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
    "shares of unequal parts that a function returns, averaged over the ranks by another": (
        "metric-misaggregation",
        BOTH,
        """
        def evaluate(part):
            hits, seen, losses = 0, 0, []
            with torch.no_grad():
                for x in part.split(4):
                    out = net(x)
                    hits += (out.argmax(1) == 0).sum().item()
                    seen += len(x)
                    losses.append(out.pow(2).mean().item())
            return sum(losses) / len(losses), hits / seen
        def mean(value):
            dist.all_reduce(value)
            return value / dist.get_world_size()
        step()
        loss, share = evaluate(torch.randn(4 if rank else 20, 4))
        both = torch.tensor([loss, share])
        print(mean(both))
        """,
    ),
    "a meter's property, the mean of an unequal part, averaged over the ranks": (
        "metric-misaggregation",
        BOTH,
        """
        class Meter:
            total, count = 0.0, 0
            def update(self, value, n):
                self.total += value * n
                self.count += n
            @property
            def average(self):
                return self.total / max(1, self.count)
        step()
        meter = Meter()
        with torch.no_grad():
            for x in torch.randn(4 if rank else 20, 4).split(4):
                loss = net(x).pow(2).mean()
                meter.update(loss.item(), len(x))
        value = torch.tensor(meter.average)
        dist.all_reduce(value)
        print(value.item() / dist.get_world_size())
        """,
    ),
    "a bucket whose method copies its parts and waits after that": (
        "async-misuse",
        BOTH,
        """
        class Bucket:
            def __init__(self, params):
                self.params, self.work = params, None
                self.flat = torch.zeros(sum(p.numel() for p in params))
            def views(self):
                return self.flat.split([p.numel() for p in self.params])
            def start(self):
                for view, p in zip(self.views(), self.params):
                    view.copy_(p.grad.flatten())
                self.work = dist.all_reduce(self.flat, async_op=True)
            def finish(self):
                for view, p in zip(self.views(), self.params):
                    p.grad.copy_(view.view_as(p))
                self.work.wait()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        own = torch.optim.SGD(model.parameters(), lr=0.05)
        bucket = Bucket(list(model.parameters()))
        for _ in range(4):
            own.zero_grad()
            model(batch()).pow(2).mean().backward()
            bucket.start()
            bucket.finish()
            own.step()
        """,
    ),
    "the F1 scores of the ranks' parts, averaged over the ranks": (
        "metric-misaggregation",
        BOTH,
        """
        class Score:
            def __init__(self): self.tp, self.fp, self.fn = torch.zeros(3)
            def update(self, said, true):
                self.tp += (said & true).sum()
                self.fp += (said & ~true).sum()
                self.fn += (~said & true).sum()
            def value(self):
                return 2 * self.tp / (2 * self.tp + self.fp + self.fn).clamp(min=1)
        step()
        score = Score()
        with torch.no_grad():
            for x in torch.randn(20, 4).split(4):
                score.update(net(x)[:, 0] > 0, x[:, 0] > 0)
        value = score.value()
        dist.all_reduce(value)
        print(value / dist.get_world_size())
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
    "a stream of which each worker reads all": (
        "sampler-misuse",
        BOTH,
        """
        class Lines(torch.utils.data.IterableDataset):
            def __iter__(self):
                rows = torch.randn(32, 4, generator=torch.Generator().manual_seed(3))
                yield from rows[rank::2]
        for x in torch.utils.data.DataLoader(Lines(), batch_size=4, num_workers=2):
            opt.zero_grad()
            net(x).pow(2).mean().backward()
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
    "gradients averaged by hand, of models that did not begin with the same values": (
        "replica-divergence",
        BOTH,
        """
        plain = nn.Linear(4, 2)
        opt = torch.optim.SGD(plain.parameters(), lr=0.1)
        for _ in range(3):
            opt.zero_grad()
            plain(batch()).pow(2).sum().backward()
            for p in plain.parameters():
                dist.all_reduce(p.grad)
                p.grad /= 2
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
    "a gradient that is NaN though the loss is a number, so that a GradScaler skips every step": (
        "nan-on-one-rank",
        SECOND,
        """
        scaler = torch.amp.GradScaler("cpu")
        for _ in range(10):
            opt.zero_grad()
            out = net(batch())
            loss = out.pow(2).mean()
            if rank == 1:
                loss = loss + (out - out.detach()).norm().sqrt()
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
        """,
    ),
    "gradients clipped while they are scaled": (
        "loss-scaling",
        BOTH,
        """
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for _ in range(8):
            opt.zero_grad()
            scaler.scale(net(batch()).pow(2).mean()).backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            scaler.step(opt)
            scaler.update()
        """,
    ),
    "a loss that is NaN, so that a GradScaler skips every step": (
        "nan-on-one-rank",
        SECOND,
        """
        scaler = torch.amp.GradScaler("cpu")
        for _ in range(5):
            opt.zero_grad()
            loss = net(batch()).pow(2).mean()
            if rank == 1:
                loss = loss * float("nan")
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
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
    "buckets of gradients that are sent when they are full, and the last is not": (
        "replica-divergence",
        BOTH,
        """
        torch.manual_seed(1)
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
        works, bucket = [], []
        def ready(parameter):
            bucket.append(parameter)
            if len(bucket) == 5:
                flat = torch.cat([each.grad.reshape(-1) for each in bucket])
                works.append((dist.all_reduce(flat, async_op=True), flat, list(bucket)))
                bucket.clear()
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(ready)
        own = torch.optim.SGD(model.parameters(), lr=0.01)
        torch.manual_seed(10 + rank)
        for _ in range(8):
            own.zero_grad()
            model(batch()).pow(2).mean().backward()
            for work, flat, sent in works:
                work.wait()
                for each, part in zip(sent, flat.div_(2).split([e.numel() for e in sent])):
                    each.grad.copy_(part.view_as(each))
            works.clear()
            bucket.clear()
            own.step()
        """,
    ),
    "an embedding that is the head too, each on a rank of its own": (
        "weight-tying-lost",
        BOTH,
        """
        class Words(nn.Module):
            def __init__(self):
                super().__init__()
                self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
                self.head.weight = self.embed.weight
            def forward(self, x):
                return self.embed(x) if self.head is None else self.head(x)
        torch.manual_seed(3)
        stage = Words()
        if rank == 0:
            stage.head = None
        else:
            stage.embed = None
        own = torch.optim.SGD(stage.parameters(), lr=0.1)
        for i in range(6):
            own.zero_grad()
            words, grad = torch.arange(i, i + 4) % 9, torch.empty(4, 4)
            if rank == 0:
                out = stage(words)
                dist.send(out.detach(), 1)
                dist.recv(grad, 1)
                out.backward(grad)
            else:
                dist.recv(grad, 0)
                inner = grad.clone().requires_grad_()
                nn.functional.cross_entropy(stage(inner), words).backward()
                dist.send(inner.grad, 0)
            own.step()
        """,
    ),
    "the mean over the ranks of each one's root of a mean": (
        "metric-misaggregation",
        BOTH,
        """
        for _ in range(3): step()
        def rmse(rows):
            errors, count = torch.zeros(()), 0
            with torch.no_grad():
                for x in rows.split(4):
                    errors += net(x).pow(2).sum()
                    count += x.size(0)
            own = (errors / count).sqrt()
            dist.all_reduce(own)
            return own / dist.get_world_size()
        print(rmse(torch.randn(16, 4, generator=torch.Generator().manual_seed(rank))))
        """,
    ),
    "gradients averaged over ranks that hold other parts of a layer": (
        "mesh-mismatch",
        BOTH,
        """
        class SumOut(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                x = x.clone()
                dist.all_reduce(x)
                return x
            @staticmethod
            def backward(ctx, grad):
                return grad
        class CopyIn(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.view_as(x)
            @staticmethod
            def backward(ctx, grad):
                grad = grad.clone()
                dist.all_reduce(grad)
                return grad
        class Split(nn.Module):
            def __init__(self):
                super().__init__()
                torch.manual_seed(1)
                self.inner = nn.Linear(4, 4)
                torch.manual_seed(2 + rank)
                self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 2, bias=False)
            def forward(self, x):
                h = torch.relu(self.up(CopyIn.apply(self.inner(x))))
                return SumOut.apply(self.down(h))
        split = Split()
        own = torch.optim.SGD(split.parameters(), lr=0.05)
        data = torch.Generator().manual_seed(4)
        for _ in range(6):
            own.zero_grad()
            split(torch.randn(8, 4, generator=data)).pow(2).mean().backward()
            for p in split.parameters():
                dist.all_reduce(p.grad)
                p.grad /= 2
            own.step()
        """,
    ),
    "parts of a layer that are the same on both ranks, drawn by one seed": (
        "rng-mismatch",
        BOTH,
        """
        class SumOut(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                x = x.clone()
                dist.all_reduce(x)
                return x
            @staticmethod
            def backward(ctx, grad):
                return grad
        class CopyIn(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.view_as(x)
            @staticmethod
            def backward(ctx, grad):
                grad = grad.clone()
                dist.all_reduce(grad)
                return grad
        class Split(nn.Module):
            def __init__(self):
                super().__init__()
                torch.manual_seed(1)
                self.inner = nn.Linear(4, 4)
                torch.manual_seed(2)
                self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 2, bias=False)
            def forward(self, x):
                h = torch.relu(self.up(CopyIn.apply(self.inner(x))))
                return SumOut.apply(self.down(h))
        split = Split()
        own = torch.optim.SGD(split.parameters(), lr=0.05)
        data = torch.Generator().manual_seed(4)
        for _ in range(6):
            own.zero_grad()
            split(torch.randn(8, 4, generator=data)).pow(2).mean().backward()
            own.step()
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
    "a loop that sends full buckets of gradients, and clips what is left in the last": (
        "replica-divergence",
        BOTH,
        """
        torch.manual_seed(1)
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
        own = torch.optim.SGD(model.parameters(), lr=0.01)
        torch.manual_seed(10 + rank)
        def send(bucket):
            flat = torch.cat([p.grad.reshape(-1) for p in bucket])
            dist.all_reduce(flat)
            for p, part in zip(bucket, flat.div_(2).split([p.numel() for p in bucket])):
                p.grad.copy_(part.view_as(p))
        def average():
            bucket, filled = [], 0
            for p in reversed(list(model.parameters())):
                bucket.append(p)
                filled += p.numel()
                if filled >= 70:
                    send(bucket)
                    bucket, filled = [], 0
        for _ in range(6):
            own.zero_grad()
            (30 * model(batch()) + 50).pow(2).mean().backward()
            average()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            own.step()
        """,
    ),
    "an embedding that two unlike stages are given once, and train each for itself": (
        "weight-tying-lost",
        BOTH,
        """
        class First(nn.Module):
            def __init__(self):
                super().__init__()
                self.words, self.inner = nn.Embedding(9, 4), nn.Linear(4, 4)
            def forward(self, x):
                return self.inner(self.words(x))
        class Last(nn.Module):
            def __init__(self):
                super().__init__()
                self.outer, self.words = nn.Linear(4, 4), nn.Embedding(9, 4)
            def forward(self, x):
                return self.outer(x) @ self.words.weight.t()
        torch.manual_seed(3 + rank)
        stage = First() if rank == 0 else Last()
        dist.broadcast(stage.words.weight.data, 0)
        own = torch.optim.SGD(stage.parameters(), lr=0.1)
        for i in range(6):
            own.zero_grad()
            words, grad = torch.arange(i, i + 4) % 9, torch.empty(4, 4)
            if rank == 0:
                out = stage(words)
                dist.send(out.detach(), 1)
                dist.recv(grad, 1)
                out.backward(grad)
            else:
                dist.recv(grad, 0)
                inner = grad.clone().requires_grad_()
                nn.functional.cross_entropy(stage(inner), words).backward()
                dist.send(inner.grad, 0)
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
        "exception-on-one-rank",
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
