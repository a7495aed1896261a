"""The rank's side of a comparison with one rank (`--against 1`).

batches.py   Records this rank's batches, or replaces them by other ranks' joined batches.
recorder.py  Keeps what this rank computes in each training step, for a comparison.
sketching.py Sketches of tensors: a few sums whose distance estimates that of the tensors.
"""
