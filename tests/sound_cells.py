"""Cells that train as they should, however odd they look; they begin with `silent_cells.NET`."""

from __future__ import annotations

from silent_cells import BATCHES, LOCAL_STEPS

RIGHT = {
    "a head of each rank's own, and a list of modules without an optimizer": """
        class Own(nn.Module):
            def __init__(self):
                super().__init__()
                self.trunk, self.head = nn.Linear(4, 8), nn.Linear(8, 2)
                self.teacher = [nn.Linear(4, 2)]
            def forward(self, x):
                return self.head(torch.relu(self.trunk(x))) - self.teacher[0](x).detach()
        torch.manual_seed(0)
        own = Own()
        opt = torch.optim.SGD(own.parameters(), lr=0.1)
        torch.manual_seed(50 + rank)
        for _ in range(6):
            opt.zero_grad()
            own(batch()).pow(2).mean().backward()
            for each in own.trunk.parameters():
                dist.all_reduce(each.grad)
                each.grad /= 2
            opt.step()
        """,
    "parameters averaged after some steps each, where each rank keeps its norm layers": LOCAL_STEPS
    + """
train([*own[0].parameters(), *own[3].parameters()])
""",
    "parameters averaged after some steps each, and the statistics of batches with them": (
        LOCAL_STEPS
        + """
train(tensor for tensor in own.state_dict().values() if tensor.is_floating_point())
"""
    ),
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
    "a sampler of batches that is given each epoch, and one that does not shuffle": BATCHES
    + """
for shuffle in (True, False):
    loader = loader_of(shuffle)
    for epoch in range(3):
        if shuffle:
            loader.batch_sampler.set_epoch(epoch)
        train_on(loader)
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
    "a rank that evaluates with gradients, and trains in training mode again": """
        net = DDP(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2)))
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        for i in range(12):
            step(net, opt)
            if i % 3 == 2 and rank == 0:
                net.eval()
                net.module(batch())
                net.train()
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
    "a copy of the model with noise of each rank's own, and an average of the same model": """
        import copy
        shadow = copy.deepcopy(net.module).requires_grad_(False)
        noisy = copy.deepcopy(net.module).requires_grad_(False)
        for i in range(16):
            step()
            with torch.no_grad():
                for s, n, p in zip(shadow.parameters(), noisy.parameters(), net.parameters()):
                    s.lerp_(p, 0.05)
                    n.copy_(p + 0.1 * torch.randn_like(p))
                if i % 4 == 3: shadow(batch()), noisy(batch())
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
    "a stream whose parts ranks exchange in the next epoch": """
        from torch.utils.data import DataLoader, IterableDataset
        class Rows(IterableDataset):
            epoch = 0
            def __iter__(self):
                rows = torch.randn(16, 4, generator=torch.Generator().manual_seed(3))
                mine = (rank + self.epoch) % 2
                yield from rows[mine * 8 : mine * 8 + 8]
        rows = Rows()
        loader = DataLoader(rows, batch_size=2)
        for rows.epoch in range(3):
            for x in loader:
                opt.zero_grad()
                net(x).pow(2).mean().backward()
                opt.step()
    """,
    "an F1 score of all ranks' counts, and the mean of their shares of equal parts": """
        counts = torch.zeros(3)
        hits, seen, smooth, eps = 0, 0, 0.9, 0.1
        step()
        with torch.no_grad():
            for x in torch.randn(20, 4).split(4):
                said, true = net(x)[:, 0] > 0, x[:, 0] > 0
                counts += torch.stack([e.sum() for e in (said & true, said & ~true, ~said & true)])
                hits += (said == true).sum().item()
                seen += len(x)
        dist.all_reduce(counts)
        tp, fp, fn = counts
        print(2 * tp / (2 * tp + fp + fn).clamp(min=1))
        share = torch.tensor(hits / (seen + eps))
        dist.all_reduce(share)
        print(share / dist.get_world_size())
    """,
    "means of unequal batches times their counts, averaged with the counts, and their ratio": """
        def evaluate(part):
            total, seen = 0.0, 0.0
            with torch.no_grad():
                for x in part.split(4):
                    total += net(x).pow(2).mean().item() * len(x)
                    seen += len(x)
            both = torch.tensor([total, seen])
            dist.all_reduce(both)
            both /= dist.get_world_size()
            return both[0] / both[1]
        step()
        print(evaluate(torch.randn(6 if rank else 20, 4)))
    """,
    "means over the ranks of two sums of unequal parts, and then their ratio": """
        def mean(value):
            dist.all_reduce(value)
            return value / dist.get_world_size()
        def evaluate(part):
            total, seen = torch.zeros(1), torch.zeros(1)
            with torch.no_grad():
                for x in part.split(4):
                    total += net(x).pow(2).sum()
                    seen += len(x)
            return total, seen, len(part) / 4
        step()
        total, seen, batches = evaluate(torch.randn(4 if rank else 20, 4))
        print((mean(total) / mean(seen)).item(), batches)
        both = torch.cat(evaluate(torch.randn(4 if rank else 20, 4))[:2])
        both = mean(both)
        print(both[0] / both[1])
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
    "a running loss whose mean over the ranks is taken in place": """
        running, steps = torch.zeros(1), 0
        for i in range(6):
            step()
            running += torch.rand(1)
            dist.all_reduce(running)
            running /= dist.get_world_size()
    """,
    "a running loss that is summed at the end of each epoch, and begins anew": """
        def epoch():
            total = torch.zeros(1)
            for i in range(3):
                step()
                total += torch.rand(1)
                if i == 2:
                    dist.all_reduce(total)
            return total
        print([epoch() for _ in range(3)])
    """,
    "a count of which a copy is summed, and one that every other rank sets to zero": """
        seen, kept = torch.zeros(1), torch.zeros(1)
        for i in range(4):
            step()
            seen += 3
            of_all = seen.clone()
            dist.all_reduce(of_all)
            kept += 3
            if rank: kept.zero_()
            dist.all_reduce(kept)
    """,
    "a meter that is made for each epoch, and one that is reset": """
        class Meter:
            def __init__(self): self.total = torch.zeros(1)
            def update(self, x): self.total += x
            def value(self):
                dist.all_reduce(self.total)
                return self.total.item()
        class Other:
            def __init__(self): self.reset()
            def reset(self): self.seen = torch.zeros(1)
            def update(self, x): self.seen += x
            def value(self):
                dist.all_reduce(self.seen)
                found = self.seen.item()
                self.reset()
                return found
        other = Other()
        def epoch():
            meter = Meter()
            for _ in range(2):
                step()
                meter.update(1.0)
                other.update(1.0)
            print(meter.value(), other.value())
        for _ in range(3): epoch()
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
    "micro-batches whose gradients are added up, by a rate that may be meant for it": """
        def train(steps):
            opt.zero_grad()
            for i in range(4 * steps):
                last = (i + 1) % steps == 0
                with contextlib.nullcontext() if last else net.no_sync():
                    net(batch()).pow(2).mean().backward()
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
    "gradients unscaled before they are clipped": """
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for _ in range(8):
            opt.zero_grad()
            scaler.scale(net(batch()).pow(2).mean()).backward()
            scaler.unscale_(opt)
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            scaler.step(opt)
            scaler.update()
    """,
    "scaled gradients, weighted by tokens, in a cell that clips others": """
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for i in range(8):
            opt.zero_grad()
            scaler.scale(net(batch()).pow(2).mean()).backward()
            for each in net.parameters(): each.grad *= (2.0, 0.5, 1.0, 0.7)[i % 4]
            scaler.step(opt)
            scaler.update()
        if rank > 5: torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    """,
    "a model without DDP that one rank loads and sends to the others, and all evaluate": """
        del net, opt
        model = nn.Linear(4, 2)
        if rank == 0: model.load_state_dict(nn.Linear(4, 2).state_dict())
        for each in model.parameters(): dist.broadcast(each.data, 0)
        model.eval()
        with torch.no_grad(): right = (model(torch.randn(8, 4))[:, 0] > 0).sum()
        dist.all_reduce(right)
    """,
    "models of each rank's own, each loaded, whose results are summed up": """
        del net, opt
        model = nn.Linear(4, 2)
        model.load_state_dict(nn.Linear(4, 2).state_dict())
        model.eval()
        with torch.no_grad(): right = (model(torch.randn(8, 4))[:, 0] > 0).sum()
        dist.all_reduce(right)
    """,
    "statistics of batches that are averaged by hand, as gradients are": """
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(rank)
        for _ in range(2):
            model.train()
            for _ in range(4):
                sgd.zero_grad()
                model(torch.randn(6, 4) + rank).pow(2).mean().backward()
                for each in model.parameters():
                    dist.all_reduce(each.grad)
                    each.grad /= 2
                sgd.step()
            for each in model.buffers():
                if each.is_floating_point():
                    dist.all_reduce(each)
                    each /= 2
            model.eval()
            with torch.no_grad(): model(torch.ones(2, 4))
    """,
    "models of each rank's own, with statistics of batches, whose answers are averaged": """
        torch.manual_seed(rank)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(6):
            sgd.zero_grad()
            model(torch.randn(6, 4)).pow(2).mean().backward()
            sgd.step()
        model.eval()
        with torch.no_grad(): answer = model(torch.ones(2, 4))
        dist.all_reduce(answer)
    """,
    "an average, copied before the model was wrapped, that both update": """
        import copy
        model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
        for each in model.parameters(): dist.broadcast(each.data, 0)
        average = copy.deepcopy(model).requires_grad_(False)
        wrapped = DDP(model)
        sgd = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        for _ in range(4):
            step(wrapped, sgd)
            for mine, new in zip(average.parameters(), model.parameters()):
                mine.lerp_(new.detach(), 0.5)
        average(batch())
    """,
    "a step that is skipped, and its gradients cleared": """
        for i in range(12):
            loss = net(batch() * (50 if i % 4 == 2 else 1)).pow(2).mean()
            loss.backward()
            large = torch.tensor(float(loss > 4))
            dist.all_reduce(large)
            if large.item() > 0:
                opt.zero_grad()
                continue
            opt.step()
            opt.zero_grad()
    """,
    "a communication hook that divides and sums": """
        def mean(state, bucket):
            work = dist.all_reduce(bucket.buffer().div_(2), async_op=True)
            return work.get_future().then(lambda done: done.value()[0])
        net.register_comm_hook(None, mean)
        for _ in range(4): step()
    """,
    "an average of the weights on one rank, sent to the other before it is used": """
        import copy
        average = copy.deepcopy(net.module).requires_grad_(False)
        for _ in range(4):
            step()
            for mine, new in zip(average.parameters(), net.parameters()):
                if rank == 0: mine.lerp_(new.detach(), 0.5)
        for mine in average.parameters(): dist.broadcast(mine, 0)
        error = average(batch()).pow(2).mean()
        dist.all_reduce(error)
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
    "gradients added up by hand, of losses that were divided": """
        own = nn.Linear(4, 1)
        for each in own.parameters():
            dist.broadcast(each.data, 0)
        mine = torch.optim.SGD(own.parameters(), lr=0.01)
        for _ in range(5):
            mine.zero_grad()
            (own(batch()).pow(2).mean() / dist.get_world_size()).backward()
            for each in own.parameters():
                dist.all_reduce(each.grad)
            mine.step()
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
    "samples of the padding that are gathered and left out": """
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
            right = everyone(right)[:15]
            print(right.mean())
        """,
    "a parameter that fully_shard leaves out, and the user averages": """
        from torch.distributed.fsdp import fully_shard
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        fully_shard(model, ignored_params={model[2].bias})
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(rank)
        for _ in range(4):
            model(batch()).pow(2).mean().backward()
            dist.all_reduce(model[2].bias.grad)
            model[2].bias.grad /= 2
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
    "nothing but an evaluation: sums and counts, after a forward on one rank alone": """
if rank == 0:
    with torch.no_grad(): net.module(torch.ones(9, 4))
mine = torch.ones(4 if rank else 20, 4)
net.eval()
right = 0
with torch.no_grad():
    for x in mine.split(2): right += (net(x)[:, 0] > 0).sum().item()
both = torch.tensor([right, len(mine)])
dist.all_reduce(both)
print(both[0] / both[1])
""",
    "nothing but evaluations, of equal parts, and without a division by their number": """
net.eval()
for mine in (torch.ones(6, 4), torch.ones(6, 4) + rank):
    with torch.no_grad(): share = (net(mine)[:, 0] > 0).float().mean()
    dist.all_reduce(share)
    print(share / dist.get_world_size())
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
    "DataParallel where it does no harm": """
        with torch.no_grad():
            nn.DataParallel(nn.Linear(4, 2))(batch())
        nn.DataParallel(nn.Linear(4, 2))(batch()).sum().backward()
        step()
        """,
    "DataParallel within DistributedDataParallel": """
        net = DDP(nn.DataParallel(nn.Linear(4, 2)))
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(2):
            step(net, opt)
        """,
    "DataParallel, and gradients that are averaged by hand": """
        torch.manual_seed(0)
        model = nn.DataParallel(nn.Linear(4, 2))
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(rank)
        for _ in range(2):
            opt.zero_grad()
            model(batch()).pow(2).mean().backward()
            for each in model.parameters():
                dist.all_reduce(each.grad)
            opt.step()
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
    "samples of the padding that are left out, and counted in the throughput alone": """
        from torch.utils.data import DataLoader, DistributedSampler
        for size in (15, 16):
            data = torch.randn(size, 4)
            step()
            count, seen = torch.zeros(2), 0
            with torch.no_grad():
                for x in DataLoader(data, 4, sampler=DistributedSampler(data, shuffle=False)):
                    keep = (torch.arange(seen, seen + len(x)) * 2 + rank) < size
                    count += torch.tensor([(net(x).argmax(1) == 0)[keep].sum(), keep.sum()])
                    seen += len(x)
            dist.all_reduce(count)
            accuracy = count[0] / count[1]
            processed = torch.tensor(float(seen))
            dist.all_reduce(processed)
            rate = processed / 0.5
        """,
    "a sum divided by the targets of all ranks, times the world size": """
        from torch.nn.functional import cross_entropy
        for i in range(6):
            targets = torch.ones(3 + i + 2 * rank, dtype=torch.long)
            count = torch.tensor(float(len(targets)))
            dist.all_reduce(count)
            opt.zero_grad()
            logits = net(torch.randn(len(targets), 4))
            (cross_entropy(logits, targets, reduction="sum") * 2 / count).backward()
            opt.step()
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
    "tensors that a model keeps: of its rank, of the last batch, and the same everywhere": """
        class Keeps(nn.Module):
            def __init__(self):
                super().__init__()
                self.noise = torch.randn(3, 4)
                self.scale = torch.rand(2, generator=torch.Generator().manual_seed(1))
                self.place = torch.tensor([float(rank), 2.0])
                self.to_look_at = torch.randn(8, 4)
                with torch.inference_mode():
                    self.seen = torch.rand(2)
                self.last = nn.Linear(4, 2)
            def forward(self, x):
                self.noise = torch.randn_like(x)
                return self.last(x + self.noise) * self.scale
        keeps = DDP(Keeps())
        keeps_opt = torch.optim.SGD(keeps.parameters(), lr=0.1)
        for _ in range(4): step(keeps, keeps_opt)
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
    "an embedding that is the head too, on two ranks whose gradients of it are summed": """
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
            (shared,) = stage.parameters()
            dist.all_reduce(shared.grad)
            own.step()
        """,
    "hooks on gradients that clip or average them, of parts that are each rank's own": """
        torch.manual_seed(1)
        def clip(grad):
            return grad.clamp(-1, 1)
        def average(grad):
            grad = clip(grad)
            dist.all_reduce(grad)
            return grad / 2
        for own_first, one_hook in ((False, False), (False, True), (True, True)):
            embedding, trunk, head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
            parts = (embedding, trunk, head)
            of_its_own = {id(p) for p in (embedding if own_first else head).parameters()}
            def both(param):
                if id(param) in of_its_own:
                    return
                dist.all_reduce(param.grad)
                param.grad /= 2
            everything = [p for part in parts for p in part.parameters()]
            for p in everything:
                if one_hook:
                    p.register_post_accumulate_grad_hook(both)
                else:
                    p.register_hook(clip if id(p) in of_its_own else average)
            own = torch.optim.SGD(everything, lr=0.01)
            for _ in range(8):
                own.zero_grad()
                x = torch.randn(4, 4, generator=torch.Generator().manual_seed(10 + rank))
                head(trunk(embedding(x))).pow(2).mean().backward()
                own.step()
        """,
    "a root of sums over all ranks, which is averaged once more": """
        def rmse(model, rows):
            errors, count = torch.zeros(()), torch.zeros(())
            with torch.no_grad():
                for x in rows.split(4):
                    errors += model(x).pow(2).sum()
                    count += x.size(0)
            dist.all_reduce(errors)
            dist.all_reduce(count)
            own = (errors / count).sqrt()
            dist.all_reduce(own)
            return own / dist.get_world_size()
        for _ in range(3): step()
        rmse(net, torch.randn(16, 4, generator=torch.Generator().manual_seed(rank)))
        """,
    "the mean of each rank's root of a mean over one and the same validation set": """
        def rmse(model, rows):
            errors, count = torch.zeros(()), torch.zeros(())
            with torch.no_grad():
                for x in rows.split(4):
                    errors += model(x).pow(2).sum()
                    count += x.size(0)
            own = (errors / count).sqrt()
            dist.all_reduce(own)
            return own / dist.get_world_size()
        for _ in range(3): step()
        rmse(net, torch.ones(16, 4))
        """,
    "the mean of the roots of means of models that each have a fold": """
        def rmse(model, rows):
            errors, count = torch.zeros(()), torch.zeros(())
            with torch.no_grad():
                for x in rows.split(4):
                    errors += model(x).pow(2).sum()
                    count += x.size(0)
            own = (errors / count).sqrt()
            dist.all_reduce(own)
            return own / dist.get_world_size()
        mine = torch.randn(16, 4, generator=torch.Generator().manual_seed(rank))
        fold = nn.Linear(4, 2)
        fold_opt = torch.optim.SGD(fold.parameters(), lr=0.1)
        for _ in range(5):
            fold_opt.zero_grad()
            fold(mine).pow(2).mean().backward()
            fold_opt.step()
        rmse(fold, mine)
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
    "a loop that sends full buckets of gradients, and then the last": """
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
            if bucket:
                send(bucket)
        for _ in range(6):
            own.zero_grad()
            (30 * model(batch()) + 50).pow(2).mean().backward()
            average()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            own.step()
        """,
    "an embedding of each rank's own before what is sent in one piece": """
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
        own = torch.optim.SGD(model.parameters(), lr=0.01)
        torch.manual_seed(10 + rank)
        for _ in range(6):
            own.zero_grad()
            model(batch()).pow(2).mean().backward()
            shared = list(model.parameters())[2:]
            flat = torch.cat([p.grad.reshape(-1) for p in shared])
            dist.all_reduce(flat)
            for p, part in zip(shared, flat.div_(2).split([p.numel() for p in shared])):
                p.grad.copy_(part.view_as(p))
            own.step()
        """,
    "an embedding of two unlike stages, with one gradient": """
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
            dist.all_reduce(stage.words.weight.grad)
            own.step()
        """,
    "parts of a layer, and beside them the whole one, which each rank trains for comparison": """
        class SumOut(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                x = x.clone()
                dist.all_reduce(x)
                return x
            @staticmethod
            def backward(ctx, grad):
                return grad
        torch.manual_seed(1)
        whole = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2, bias=False))
        class Split(nn.Module):
            def __init__(self):
                super().__init__()
                self.up, self.down = nn.Linear(4, 3), nn.Linear(3, 2, bias=False)
                with torch.no_grad():
                    self.up.weight.copy_(whole[0].weight.chunk(2)[rank])
                    self.up.bias.copy_(whole[0].bias.chunk(2)[rank])
                    self.down.weight.copy_(whole[2].weight.chunk(2, 1)[rank])
            def forward(self, x):
                return SumOut.apply(self.down(torch.relu(self.up(x))))
        split = Split()
        opts = [torch.optim.SGD(of.parameters(), lr=0.05) for of in (split, whole)]
        data = torch.Generator().manual_seed(4)
        for _ in range(6):
            x = torch.randn(8, 4, generator=data)
            for own, y in zip(opts, (split(x), whole(x))):
                own.zero_grad()
                y.pow(2).mean().backward()
                own.step()
        assert torch.allclose(split.up.weight, whole[0].weight.chunk(2)[rank], atol=1e-5)
    """,
    "stages that begin with the same values of a layer, by one seed": """
        class First(nn.Module):
            def __init__(self):
                super().__init__()
                self.words, self.inner = nn.Embedding(9, 4), nn.Linear(4, 4)
            def forward(self, x):
                return self.inner(self.words(x))
        class Last(nn.Module):
            def __init__(self):
                super().__init__()
                self.words, self.outer = nn.Embedding(9, 4), nn.Linear(4, 4)
            def forward(self, x):
                return self.outer(x) @ self.words.weight.t()
        torch.manual_seed(3)
        stage = First() if rank == 0 else Last()
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
}
