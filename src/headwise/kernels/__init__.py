"""Kernels for the CPU that torch has no operation for, each a custom operation of torch."""
