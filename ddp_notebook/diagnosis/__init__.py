"""What the facts mean: findings from what all ranks report. Pure functions; standard library only.

collectives/    Rules for collectives: who diverged from the others, and how.
context.py      All that rules about collectives look at: the case, and what is worked out from
diagnose.py     The way in to the rules, for those who may never need them.
majority.py     Which ranks differ from the rest, and which of two values is the right one.
progress.py     Whether a rank that runs code of its own gets on there.
run_rules.py    What is wrong with a run: the rules of set-up and those of collectives, in one o
setup/          Rules for set-up.
setup_rules.py  Why set-up does not get on: findings from the evidence of all ranks, as pure fun
training/       Rules for training that ends well and is wrong.
"""
