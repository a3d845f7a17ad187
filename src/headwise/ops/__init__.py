"""Matrix products that choose between torch and CPU kernels, and random numbers that do not depend
on batching.

`linear`: x W^T, by a kernel for a few tokens and large matrices; `counter_rng`: random numbers
addressed by seed and counter (Philox), the same on every machine, and cheap dropout on CPUs.
"""
