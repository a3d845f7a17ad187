"""Many machines: how the ranks of a world divide a training among themselves, and what each holds of a model."""
