"""Cells that train as they should, however odd they look; they begin with `silent_cells.NET`."""

from __future__ import annotations

RIGHT = {
    "two models, where each loss clears what the other left; and heads before shared layers": """
        make, judge = net, DDP(nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1)))
        opt_judge = torch.optim.SGD(judge.parameters(), lr=0.1)
        score = nn.functional.softplus
        for i in range(6):
            opt.zero_grad()
            score(-judge(make(batch()))).mean().backward()
            opt.step()
            opt_judge.zero_grad(set_to_none=i % 2 == 0)
            real, fake = torch.randn(3, 2) + 1, make(batch()).detach()
            (score(judge(fake)) + score(-judge(real))).mean().backward()
            opt_judge.step()
        heads = [DDP(nn.Linear(2, 1)) for _ in range(2)]
        opts = [torch.optim.SGD(head.parameters(), lr=0.05) for head in heads]
        for _ in range(6):
            for each in (opt, *opts):
                each.zero_grad()
            for head, own in zip(heads, opts):
                head(net(batch())).pow(2).mean().backward()
                own.step()
            opt.step()
        del make, judge, opt_judge, heads, head, opts, own, each
        """,
    "a model that is unfrozen after some steps, and wrapped again": """
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        model[0].requires_grad_(False)
        net = DDP(model)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for i in range(8):
            if i == 4:
                model[0].requires_grad_(True)
                net = DDP(model)
            step(net, opt)
        """,
    "one task on each rank, and their mean": """
        for _ in range(4):
            step()
        def evaluate_task(size):
            with torch.no_grad():
                return (net.module(torch.randn(size, 4)).argmax(1) == 0).float()
        hits = evaluate_task(12 + 20 * rank)
        macro = hits.mean()
        dist.all_reduce(macro)
        macro /= dist.get_world_size()
        """,
    "gradients of micro-batches that all ranks halve, and clip once they are averaged": """
        for i in range(24):
            last = i % 3 == 2
            with contextlib.nullcontext() if last else net.no_sync():
                ((net(batch() * (1 + 4 * rank)) - 9).pow(2).mean() / 3).backward()
            if not last:
                for p in net.parameters(): p.grad *= 0.5
            else:
                torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
                opt.step()
                opt.zero_grad()
    """,
    "a stream whose workers share its parts, and whose batches go forward twice": """
        class Lines(torch.utils.data.IterableDataset):
            def __iter__(self):
                rows = torch.randn(64, 4, generator=torch.Generator().manual_seed(3))
                worker = torch.utils.data.get_worker_info()
                yield from rows[rank::2][worker.id :: worker.num_workers]
        for x in torch.utils.data.DataLoader(Lines(), batch_size=4, num_workers=2):
            for _ in range(2):
                opt.zero_grad()
                net(x).pow(2).mean().backward()
                opt.step()
    """,
    "a bucket whose method waits and copies its parts, and fills them while none is at work": """
        class Bucket:
            def __init__(self, params):
                self.params, self.work = params, None
                self.flat = torch.zeros(sum(p.numel() for p in params))
            def views(self):
                return self.flat.split([p.numel() for p in self.params])
            def start(self):
                for view, p in zip(self.views(), self.params):
                    view.copy_(p.grad.flatten() / 2)
                self.work = dist.all_reduce(self.flat, async_op=True)
            def finish(self):
                self.work.wait()
                for view, p in zip(self.views(), self.params):
                    p.grad.copy_(view.view_as(p))
                print(self.flat.norm())
                self.work = None
            def drop(self):
                self.flat.zero_()
                if self.work is not None: self.work.wait()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        own = torch.optim.SGD(model.parameters(), lr=0.05)
        bucket = Bucket(list(model.parameters()))
        for _ in range(4):
            own.zero_grad()
            model(batch()).pow(2).mean().backward()
            bucket.start()
            bucket.finish()
            bucket.drop()
            own.step()
    """,
    "teams that train apart, each by the learning rate that it has agreed on": """
        teams = [dist.new_group([member]) for member in range(2)]
        torch.manual_seed(rank)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        own = torch.optim.SGD(model.parameters(), lr=0.05 * (1 + rank))
        for _ in range(6):
            own.zero_grad()
            model(batch()).pow(2).mean().backward()
            for p in model.parameters():
                dist.all_reduce(p.grad, group=teams[rank])
            own.step()
        result = torch.zeros(1)
        dist.all_reduce(result)
    """,
    "micro-batches, each divided by their number": """
        def train(steps):
            opt.zero_grad()
            for i in range(4 * steps):
                last = (i + 1) % steps == 0
                with contextlib.nullcontext() if last else net.no_sync():
                    (net(batch()).pow(2).mean() / steps).backward()
                if last:
                    opt.step()
                    opt.zero_grad()
        train(steps=3)
    """,
    "a GradScaler that looks for its scale": """
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
        for i in range(12):
            opt.zero_grad()
            scaler.scale(net(batch()).pow(2).mean() * 8).backward()
            scaler.step(opt)
            scaler.update(1024.0 if i == 5 else None)
    """,
    "a communication hook that divides and sums": """
        def mean(state, bucket):
            work = dist.all_reduce(bucket.buffer().div_(2), async_op=True)
            return work.get_future().then(lambda done: done.value()[0])
        net.register_comm_hook(None, mean)
        for _ in range(4): step()
    """,
    "accumulated gradients, cleared after each step": """
        for i in range(10):
            with net.no_sync() if i % 2 == 0 else contextlib.nullcontext():
                (net(batch()).pow(2).mean() / 2).backward()
            if i % 2:
                opt.step()
                opt.zero_grad(set_to_none=False)
    """,
    "a head of one seed, outside the wrapper, whose ranks join it at the end": """
        torch.manual_seed(0)
        head = nn.Linear(2, 3)
        both = torch.optim.SGD([*net.parameters(), *head.parameters()], lr=0.1)
        torch.manual_seed(100 + rank)
        for _ in range(4):
            both.zero_grad()
            head(net(batch())).pow(2).mean().backward()
            both.step()
        every = [None, None]
        dist.all_gather_object(every, head.state_dict())
    """,
    "a copy for each task, trained by an optimizer of its own, and a head of each rank's own": """
        import copy
        head = nn.Linear(2, 1)
        both = torch.optim.SGD([*net.parameters(), *head.parameters()], lr=0.1)
        for _ in range(4):
            fast = copy.deepcopy(net.module)
            inner = torch.optim.SGD(fast.parameters(), lr=0.1)
            for _ in range(4):
                step(fast, inner)
            both.zero_grad()
            (0.5 * head(net(batch())).pow(2).mean()).backward()
            both.step()
    """,
    "handles waited for in every way": """
        flat = torch.ones(100)
        for _ in range(2):
            step()
            handle = dist.all_reduce(flat[:50], async_op=True)
            flat[50:] += 1  # another part of the same memory
            handle.wait()
            x = torch.ones(10)
            handle = dist.all_reduce(x, async_op=True)
            while not handle.is_completed():
                pass
            x += 1
            y = torch.ones(10)
            dist.broadcast(y, 0, async_op=True)
            dist.barrier()
            y += 1
            dist.all_reduce(torch.ones(3), async_op=True)
            to = [dist.P2POp(dist.isend, torch.ones(4), 1 - rank)]
            to += [dist.P2POp(dist.irecv, torch.empty(4), 1 - rank)]
            for handle in dist.batch_isend_irecv(to):
                handle.wait()
        import torch.distributed._functional_collectives as functional
        functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD) + 1
        functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD)
        raw, name = torch.ops._c10d_functional, dist.group.WORLD.group_name
        raw.wait_tensor(raw.all_reduce(torch.ones(4), "sum", name)).add_(1)
        """,
    "models split over the ranks, by torch and by hand": """
        import os, shutil, tempfile
        import torch.distributed.checkpoint as dcp
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
        from torch.distributed.tensor.parallel import parallelize_module
        class Sum(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, back):
                ctx.back = back
                x = x.clone()
                if not back:
                    dist.all_reduce(x)
                return x
            @staticmethod
            def backward(ctx, grad):
                grad = grad.clone()
                if ctx.back:
                    dist.all_reduce(grad)
                return grad, None
        class Split(nn.Module):
            def __init__(self):
                super().__init__()
                self.norm = nn.LayerNorm(4)
                self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 2, bias=False)
            def forward(self, x):
                return Sum.apply(self.down(self.up(Sum.apply(self.norm(x), True)).relu()), False)
        tp = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        plan = {"1": ColwiseParallel(), "3": RowwiseParallel()}
        parts = {"0": ColwiseParallel(input_layouts=Shard(0))}  # rows of its own for each rank
        torch.manual_seed(0)
        layers = nn.LayerNorm(4), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)
        models = [parallelize_module(nn.Sequential(*layers), tp, plan)]
        torch.manual_seed(rank)
        models += [Split(), parallelize_module(nn.Sequential(nn.Linear(4, 8)), tp, parts)]
        for number, model in enumerate(models):
            opt = torch.optim.SGD(model.parameters(), lr=0.1)
            torch.manual_seed(7 + rank * (number == 2))
            for _ in range(4):
                step(model, opt)
        folder = tempfile.mkdtemp()
        torch.save(models[0].state_dict(), os.path.join(folder, f"part-{rank}.pt"))
        dcp.save({"model": models[2].state_dict()}, checkpoint_id=f"{tempfile.gettempdir()}/both")
        dist.barrier()
        shutil.rmtree(folder)
        shutil.rmtree(f"{tempfile.gettempdir()}/both", ignore_errors=True)
        """,
    "two networks that train each other": """
        other = DDP(nn.Linear(2, 4))
        both = [torch.optim.Adam(each.parameters()) for each in (net, other)]
        for _ in range(6):
            both[0].zero_grad()
            net(other(torch.randn(3, 2)).detach()).mean().backward()
            both[0].step()
            both[1].zero_grad()
            net(other(torch.randn(3, 2))).mean().backward()
            both[1].step()
        """,
    "a sharded model, accumulated and clipped": """
        from torch.distributed.fsdp import fully_shard
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        fully_shard(model[0]), fully_shard(model)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for i in range(8):
            model.set_requires_gradient_sync(i % 2 == 1)
            model(batch()).pow(2).mean().backward()
            if i % 2:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
                opt.step()
                opt.zero_grad()
        """,
    "one order of samples, drawn on every rank, and dropout": """
        net = DDP(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 2)))
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        torch.manual_seed(7)
        data = torch.randn(40, 4)
        for _ in range(6):
            opt.zero_grad()
            net(data[torch.randperm(40)[:6][rank::2]]).pow(2).mean().backward()
            opt.step()
        """,
    "evaluations: of all, joined, told by each rank, and a teacher's": """
        for e in range(3):
            net.train()
            for _ in range(2):
                with torch.no_grad():
                    net(batch())
                step()
            net.eval()
            with torch.no_grad():
                value = net(batch() if e else torch.ones(3, 4)).pow(2).mean()
            if e == 1:
                dist.all_reduce(value)
            if rank == 0 or e == 2:
                print(value.item())
        """,
    "a plain loop": "for _ in range(3): step()",
    "parameters that may be unused": """
        class Toy(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b = nn.Linear(4, 2), nn.Linear(4, 2)
            def forward(self, x):
                return self.a(x)
        net = DDP(Toy(), find_unused_parameters=True)
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(3):
            opt.zero_grad(); net(batch()).pow(2).mean().backward(); opt.step()
        """,
    "statistics of batches": """
        for sends in (True, False):
            body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
            net = DDP(body, broadcast_buffers=sends)
            opt = torch.optim.Adam(net.parameters())
            for _ in range(3):
                step(net, opt)
        """,
    "inference without the wrapper": """
        for _ in range(2):
            step()
            if rank == 0:
                with torch.no_grad():
                    net.module.eval()(batch())
                net.module.train()
            net.module(batch())
        step()
        """,
    "two models": """
        G, D = DDP(nn.Linear(3, 4)), DDP(nn.Linear(4, 1))
        g, d = (torch.optim.Adam(m.parameters()) for m in (G, D))
        for _ in range(3):
            d.zero_grad()
            (D(G(torch.randn(2, 3)).detach()).mean() - D(batch()).mean()).backward()
            d.step()
            g.zero_grad()
            D.requires_grad_(False)
            with D.no_sync():
                D(G(torch.randn(2, 3))).mean().backward()
            D.requires_grad_(True)
            g.step()
        """,
    "a moving average": """
        import copy
        ema = copy.deepcopy(net.module)
        for _ in range(3):
            step()
            with torch.no_grad():
                for mine, theirs in zip(ema.parameters(), net.parameters()):
                    mine.lerp_(theirs, 0.1)
        ema(batch())
        """,
    "a checkpoint that every rank loads": """
        import io
        step()
        file = io.BytesIO()
        torch.save([net.module.state_dict(), opt.state_dict()], file)
        file.seek(0)
        model, state = torch.load(file)
        net.module.load_state_dict(model); opt.load_state_dict(state)
        step()
        """,
    "a checkpoint that rank 0 loads before wrapping, and sends": """
        import io
        model = nn.Linear(4, 2)
        if rank == 0:
            model.load_state_dict({"weight": torch.ones(2, 4), "bias": torch.ones(2)})
        wrapped = DDP(model)
        opt = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        step(wrapped, opt)
        if rank == 0:
            model.load_state_dict({"weight": torch.ones(2, 4), "bias": torch.ones(2)})
        for each in model.parameters():
            dist.broadcast(each.data, 0)
        step(wrapped, opt)
        """,
    "an optimizer's first step, for its scheduler, and one of a model at rest": """
        twin = DDP(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
        other = torch.optim.SGD(twin.parameters(), lr=0.1)
        other.step()
        for _ in range(3):
            step()
            other.zero_grad()
            other.step()
        """,
    "gradients averaged by hand": """
        for _ in range(3):
            opt.zero_grad()
            net.module(batch()).pow(2).mean().backward()
            for each in net.parameters():
                dist.all_reduce(each.grad)
                each.grad /= world_size
            opt.step()
        """,
    "a probe of the head alone, and a head that the optimizer was given later": """
        probe = torch.optim.SGD(net.module[2].parameters(), lr=0.1)
        for _ in range(4): step(net, probe)
        body = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 9))
        opt = torch.optim.SGD(body.parameters(), lr=0.1)
        torch.manual_seed(0)
        body[1] = nn.Linear(8, 2)
        opt.add_param_group({"params": body[1].parameters()})
        net = DDP(body)
        for _ in range(4): step(net, opt)
        """,
    "a linear model of each rank's own, with the same input": """
        plain = nn.Linear(4, 2)
        opt = torch.optim.SGD(plain.parameters(), lr=0.1)
        for _ in range(3):
            opt.zero_grad()
            plain(torch.ones(3, 4)).sum().backward()
            opt.step()
        """,
    "a sampler that does not shuffle": """
        from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
        data = TensorDataset(torch.arange(64.0).view(16, 4))
        sampler = DistributedSampler(data, shuffle=False)
        for _ in range(3):
            for (x,) in DataLoader(data, batch_size=4, sampler=sampler):
                opt.zero_grad(); net(x).mean().backward(); opt.step()
        """,
    "one epoch, and a sampler for validation": """
        from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
        data = TensorDataset(torch.arange(64.0).view(16, 4))
        sampler, other = DistributedSampler(data), DistributedSampler(data)
        for (x,) in DataLoader(data, batch_size=4, sampler=sampler):
            opt.zero_grad(); net(x).mean().backward(); opt.step()
            with torch.no_grad():
                for (y,) in DataLoader(data, batch_size=4, sampler=other):
                    net(y)
        """,
    "every rank has data of its own": """
        from torch.utils.data import DataLoader, TensorDataset
        data = TensorDataset(torch.arange(64.0).view(16, 4) + 64 * rank)
        for (x,) in DataLoader(data, batch_size=4):
            opt.zero_grad(); net(x / 64).mean().backward(); opt.step()
        """,
    "steps of an optimizer within backward": """
        optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in net.parameters()}
        for p in net.parameters():
            p.register_post_accumulate_grad_hook(lambda p: None)
        for _ in range(2):
            net(batch()).pow(2).mean().backward()
            for each in optimizers.values():
                each.step(); each.zero_grad()
        """,
    "a static graph, gradients that are views, compressed gradients": """
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
        class Toy(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b = nn.Linear(4, 2), nn.Linear(4, 2)
            def forward(self, x):
                return self.a(x)
        for options in ({"static_graph": True}, {"gradient_as_bucket_view": True}):
            torch.manual_seed(0)
            net = DDP(Toy() if "static_graph" in options else nn.Linear(4, 2), **options)
            torch.manual_seed(100 + rank)
            net.register_comm_hook(None, default_hooks.fp16_compress_hook)
            opt = torch.optim.SGD(net.parameters(), lr=0.1)
            for _ in range(3):
                step(net, opt)
        """,
    "states of the optimizer in shards": """
        from torch.distributed.optim import ZeroRedundancyOptimizer
        opt = ZeroRedundancyOptimizer(net.parameters(), torch.optim.Adam, lr=0.01)
        for _ in range(3):
            step(opt=opt)
        """,
    "uneven inputs that are joined": """
        from torch.distributed.algorithms.join import Join
        with Join([net]):
            for _ in range(2 + 2 * rank):
                step()
        """,
    "checkpoints of activations": """
        from torch.utils.checkpoint import checkpoint
        class Toy(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)
            def forward(self, x):
                return self.b(checkpoint(self.a, x, use_reentrant=False))
        net = DDP(Toy())
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(3):
            step(net, opt)
        """,
    "a frozen body, two optimizers, a penalty on the weights": """
        body = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(4, 2))
        body[0].requires_grad_(False)
        net = DDP(body)
        first = torch.optim.SGD(body[1].parameters(), lr=0.1)
        second = torch.optim.AdamW(body[2].parameters())
        for _ in range(3):
            first.zero_grad(); second.zero_grad()
            loss = net(batch()).pow(2).mean()
            loss = loss + sum(p.pow(2).sum() for p in net.module.parameters() if p.requires_grad)
            loss.backward()
            first.step(); second.step()
        """,
    "a compiled model": """
        model = torch.compile(net, backend="eager")
        for _ in range(2):
            step(model)
        net.module(batch())
        step(model)
        """,
    "a model of each rank's own, beside": """
        own = nn.Linear(4, 2)
        alone = torch.optim.SGD(own.parameters(), lr=0.1)
        for _ in range(2):
            step()
            own(batch() + rank).pow(2).mean().backward()
            alone.step()
        """,
    "clipping": """
        for _ in range(3):
            opt.zero_grad()
            net(batch()).pow(2).mean().backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            opt.step()
        """,
    "training that diverges everywhere": """
        opt = torch.optim.SGD(net.parameters(), lr=1e30)
        for _ in range(4):
            step(opt=opt)
        """,
    "PostLocalSGD between two averages": """
        from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as post
        from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
        alone = [dist.new_group([each]) for each in range(world_size)][rank]
        state = post.PostLocalSGDState(None, subgroup=alone, start_localSGD_iter=2)
        net.register_comm_hook(state, post.post_localSGD_hook)
        averager = PeriodicModelAverager(period=4, warmup_steps=2)
        for _ in range(9):
            step()
            averager.average_parameters(net.parameters())
        """,
    "a communication hook that sends nothing": """
        def keep(state, bucket):
            future = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future
        net.register_comm_hook(None, keep)
        for _ in range(2):
            step()
        """,
    "a communication hook that reduces among some ranks": """
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
        alone = [dist.new_group([each]) for each in range(world_size)][rank]
        net.register_comm_hook(alone, default_hooks.fp16_compress_hook)
        for _ in range(2):
            step()
        """,
    "PowerSGD": """
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power
        state = power.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
        net.register_comm_hook(state, power.powerSGD_hook)
        for _ in range(5):
            step()
        """,
    "files saved in turn, one for each rank, and by rank 0; weights that are tied": """
        import os, tempfile
        class Tied(nn.Module):
            def __init__(self):
                super().__init__()
                self.first = nn.Linear(4, 4, bias=False)
                self.last = nn.Linear(4, 4, bias=False)
                self.last.weight = self.first.weight
                self.copied = nn.Linear(4, 4, bias=False)
                self.copied.load_state_dict(self.first.state_dict())
            def forward(self, x):
                return self.last(self.copied(self.first(x)))
        torch.manual_seed(0)
        tied = DDP(Tied())
        tied_opt = torch.optim.SGD(tied.parameters(), lr=0.1)
        torch.manual_seed(rank)
        path = os.path.join(tempfile.gettempdir(), f"turns-{os.getppid()}.pt")
        for turn in range(2):
            step(tied, tied_opt)
            torch.save(tied_opt.state_dict(), f"{path}-{rank}")
            if turn == rank:
                torch.save(tied.state_dict(), path)
            dist.barrier()
        os.remove(f"{path}-{rank}")
        if rank == 0:
            os.remove(path)
        """,
    "data made at random and split by one seed; then drawn by weights, otherwise on each rank": """
        from torch.utils.data import (
            DataLoader, DistributedSampler, TensorDataset, WeightedRandomSampler, random_split
        )
        data, seed = TensorDataset(torch.arange(160.).view(40, 4)), torch.Generator()
        train, held_out = random_split(data, [32, 8], generator=seed.manual_seed(3))
        noise = TensorDataset(torch.randn(32, 4))
        own = torch.Generator().manual_seed(50 + rank)
        for sampler in (
            DistributedSampler(train),
            DistributedSampler(noise),
            WeightedRandomSampler([1.0] * 32, 16, generator=own),
        ):
            for (x,) in DataLoader(noise if sampler is not train else train, 4, sampler=sampler):
                opt.zero_grad()
                net(x).pow(2).mean().backward()
                opt.step()
        """,
    "parameters that are sent and waited for before the next step": """
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
            works = [dist.broadcast(p.data, owner[p], async_op=True) for p in owner]
            for work in works: work.wait()
        """,
    "a layer in parts, and an average of the gradients of what both ranks have": """
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
            for p in split.inner.parameters():
                dist.all_reduce(p.grad)
                p.grad /= 2
            own.step()
        """,
    "rows in parts: one batch and one model on both ranks, of which each computes its half": """
        class SumOut(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                x = x.clone()
                dist.all_reduce(x)
                return x
            @staticmethod
            def backward(ctx, grad):
                return grad
        class Halves(nn.Module):
            def __init__(self):
                super().__init__()
                torch.manual_seed(1)
                self.inner, self.out = nn.Linear(4, 6), nn.Linear(6, 2)
            def forward(self, x):
                mine = x.chunk(2)[rank]
                pooled = torch.relu(self.inner(mine)).sum(0, keepdim=True)
                return self.out(SumOut.apply(pooled) / len(x))
        halves = Halves()
        own = torch.optim.SGD(halves.parameters(), lr=0.05)
        data = torch.Generator().manual_seed(4)
        for _ in range(6):
            own.zero_grad()
            halves(torch.randn(8, 4, generator=data)).pow(2).mean().backward()
            for p in halves.inner.parameters():
                dist.all_reduce(p.grad)
            own.step()
        """,
    "an outer optimizer whose gradients are differences of weights, and never cleared": """
        model = nn.Linear(4, 2)
        for p in model.parameters(): dist.broadcast(p.data, 0)
        anchor = [p.detach().clone().requires_grad_() for p in model.parameters()]
        inner = torch.optim.SGD(model.parameters(), lr=0.05)
        outer = torch.optim.SGD(anchor, lr=0.7)
        for _ in range(6):
            for _ in range(3):
                inner.zero_grad()
                model(batch()).pow(2).mean().backward()
                inner.step()
            for a, p in zip(anchor, model.parameters()):
                delta = a.detach() - p.detach()
                dist.all_reduce(delta)
                a.grad = delta / 2
            outer.step()
            with torch.no_grad():
                for a, p in zip(anchor, model.parameters()): p.copy_(a)
        """,
    "a head that is replaced between two stages, with its own optimizer or a group of the old": """
        class Tagger(nn.Module):
            def __init__(self):
                super().__init__()
                self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 3)
            def forward(self, x):
                return self.head(torch.relu(self.body(x)))
        for by_group in (True, False):
            tagger = Tagger()
            own = torch.optim.AdamW(tagger.parameters(), lr=0.01)
            every = [own]
            for outputs in (3, 2):
                if outputs == 2:
                    tagger.head = nn.Linear(8, outputs)
                    if by_group:
                        own.add_param_group({"params": tagger.head.parameters()})
                    else:
                        every.append(torch.optim.AdamW(tagger.head.parameters(), lr=0.1))
                wrapped = DDP(tagger)
                for _ in range(6):
                    loss = wrapped(batch()).pow(2).mean()
                    tagger.zero_grad(set_to_none=True)
                    loss.backward()
                    for each in every: each.step()
        """,
}
