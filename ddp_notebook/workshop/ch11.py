"""The exercises of notebook 11: what one hears about distributed training, true or false."""

from __future__ import annotations

from collections.abc import Callable

from ddp_notebook.workshop.answers import yes_or_no
from ddp_notebook.workshop.check import WrongAnswer, exercise


def _sentence(name: str, *, true: bool, because: str, look: str) -> Callable[[bool], str]:
    """Declare the exercise of a sentence that is `true` or not; `look` leads to why."""

    def judge(answer: bool) -> str:
        if answer is not true:
            raise WrongAnswer(look)
        return f"right, it is {str(true).lower()}: {because}"

    return exercise(name, yes_or_no)(judge)


_sentence(
    "11.1",
    true=False,
    because="DDP averages gradients, which have the shapes of the parameters, not of the batch. "
    "But the mean of the ranks' means weighs a sample of a small batch more. What hangs is a rank "
    "with fewer batches than the others: notebook 5.",
    look="did any rank print nothing? All of them finished.",
)
_sentence(
    "11.2",
    true=False,
    because="the others wait, here two seconds, and go on. They give up only after the group's "
    "timeout: 30 minutes with gloo, 10 with NCCL, unless init_process_group gets another one.",
    look="the cell has ended on every rank. How long did the others wait?",
)
_sentence(
    "11.3",
    true=False,
    because="no process removes the file of a killed job, and the next job meets addresses of "
    "processes that are gone. And it holds what ranks have told each other, not a list of hosts: "
    "who takes part is said by RANK and WORLD_SIZE, as ever.",
    look="read the two lines that were printed: whose address does the next job read?",
)
_sentence(
    "11.4",
    true=False,
    because="each rank finds a port of its own, and then all but rank 0 connect to a port where no "
    "process listens. One process finds the port and gives it to all, as torchrun does.",
    look="how many different ports did the ranks find? They are to meet at one.",
)
_sentence(
    "11.5",
    true=True,
    because="the wrapper sends rank 0's parameters and buffers to all ranks. The seed matters "
    "for what comes later: dropout and augmentation should differ between ranks, and what is made "
    "without DDP must not.",
    look="compare the sums of the weights after DDP(net) with those before.",
)
_sentence(
    "11.6",
    true=False,
    because="gradients are averaged, the loss is not. Reduce it (as a detached copy) before "
    "you print it, or say that it is rank 0's.",
    look="the first number is the rank's own loss, the second the mean. Compare them on rank 0.",
)
_sentence(
    "11.7",
    true=False,
    because="the rank that left the loop does not call the barrier either, so the others wait in "
    "the barrier. A cure makes all ranks decide alike.",
    look="in which collective do the ranks wait now, and who has not called it?",
)
_sentence(
    "11.8",
    true=True,
    because="the first call of each rank meets the first of the others, whatever is in it. The "
    "shapes agree, so nothing can notice: a and b were mixed. This is worse than a hang.",
    look="the cell has ended on every rank. (Look at the values as well.)",
)
_sentence(
    "11.9",
    true=False,
    because="it is one process whose threads share an interpreter, copies the model in every "
    "step, and knows no other machine; without a GPU it calls the model and does nothing else. "
    "PyTorch's own documentation recommends DistributedDataParallel also on one machine.",
    look="over how many GPUs does it spread a batch here? And in how many processes?",
)
_sentence(
    "11.10",
    true=False,
    because="each step now waits for the slowest rank and for the all_reduce. A model as small as "
    "this one computes for less time than it communicates: notebook 7 measures where that ends.",
    look="always? Compare the two numbers, and think of a model of one layer on 64 ranks.",
)
_sentence(
    "11.11",
    true=False,
    because="each collective is first compared through the store and a second group. Take it to "
    "find a mistake, not to train. (A cell of this notebook is compared as well, at the "
    "cost of some microseconds.)",
    look="divide the two numbers. Would you pay that in each step?",
)
