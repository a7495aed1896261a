"""Rules for set-up.

argument_rules.py     Rules about what the ranks came with: values that differ, cannot work, or
data_worker_rules.py  Rules about ranks that wait for a batch which a stuck worker of their Data
presence_rules.py     Rules about who is not there: dead, done, never asked, late.
reach_rules.py        Rules about ranks on several hosts whose store answers, and who do not rea
store_rules.py        Rules about the store: nobody answers, the wrong one does, or it holds an
torch_errors.py       What errors of torch mean, by their words; and which of them are only some
"""
