"""The rank's side of a comparison with one rank (`--against 1`).

batches.py   The batches of this rank, kept; or those of other ranks joined, in place of its own.
recorder.py  Keeps what this rank computes in each training step, for a comparison.
sketching.py Tensors as a few sums whose distance tells that of the tensors.
"""
