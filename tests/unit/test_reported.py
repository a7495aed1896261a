"""Does a program print a number that its evaluation came to? By its source alone."""

from __future__ import annotations

import ast
import textwrap

import pytest

from ddp_notebook.diagnosis.source_code.training_code import is_reported

LOOP = """
for epoch in range(2):
    for x, y in train:
        out = net(x)
        loss = criterion(out, y)
        loss.backward()
    net.eval()
    right = 0
    with torch.no_grad():
        for x, y in test:
            out = net(x)  # here
            right += (out.argmax(1) == y).sum().item()
"""
FUNCTION = """
def accuracy(loader):
    right = count = 0
    with torch.no_grad():
        for x, y in loader:
            right += (net(x).argmax(1) == y).sum().item()  # here
            count += len(y)
    return right / count

for epoch in range(2):
    train(epoch)
"""
METHOD = """
class Trainer:
    def evaluate(self):
        losses = []
        for x in self.test:
            losses.append(self.model(x).mean().item())  # here
        return {"loss": sum(losses) / len(losses)}

    def fit(self):
        self.epoch()
        metrics = self.evaluate()
        return metrics

def main():
    trainer = Trainer()
    best = trainer.fit()
"""
LABELS = """
labels = []
with torch.no_grad():
    for x in data:
        labels.append((x, (net(x) > 0).float()))  # here
for x, label in labels:
    loss = criterion(net(x), label)
    loss.backward()
"""
SAVED = """
preds = []
with torch.no_grad():
    for x in data:
        preds.append(net(x))  # here
torch.save(preds, f"part{rank}.pt")
"""
STORE = """
right = 0
with torch.no_grad():
    for x, y in data:
        right += (net(x).argmax(1) == y).sum().item()  # here
store.add("right", right)
"""
ONCE = """
net.eval()
value = net(x).mean().item()  # here
"""


@pytest.mark.parametrize(
    ("program", "said", "reported"),
    [
        (LOOP, "    if rank == 0:\n        print(f'epoch {epoch}: {right / 100:.3f}')", True),
        (LOOP, "    if rank == 0:\n        print('epoch', epoch, 'loss', loss.item())", False),
        (LOOP, "    print('one more epoch')", False),
        (LOOP, "    share = right / len(test)\n    logger.info('test %s', share)", True),
        (FUNCTION, "    value = accuracy(test)\n    if rank == 0:\n        print(value)", True),
        (FUNCTION, "    if rank == 0: print(accuracy(test))", True),
        (FUNCTION, "    scores.append(accuracy(test))\n    print('epoch', epoch)", False),
        (METHOD, "    if rank == 0:\n        print('best', best)", True),
        (METHOD, "    print('done')", False),
        (LABELS, "    if rank == 0: print(loss.item())", False),
        (SAVED, "if rank == 0: print('predictions saved')", False),
        (STORE, "if rank == 0: print(int(store.add('right', 0)) / 32)", False),
        (ONCE, "if rank == 0: print(value)", True),
        (ONCE, "print('warm')", False),
    ],
)
def test_a_print_counts_that_is_of_a_number_of_the_evaluation(
    program: str, said: str, reported: bool
) -> None:
    text = textwrap.dedent(program) + said + "\n"
    line = next(n for n, each in enumerate(text.splitlines(), 1) if "# here" in each)
    assert is_reported(ast.parse(text), line) is reported
