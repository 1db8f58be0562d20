"""Triton kernels, and what is known of their cost. Nothing here imports another of the four folders.

- `ops`: the Triton kernels, and how each is cut into tiles;
- `inspect`: what a compiler says of them, also for GPUs that are not here;
- `latency`: what the parts of an iteration cost on a device, in tables that are measured or put together;
- `tiles`: where their tiles end: the steps of a latency staircase, and what they mean for the token budget.

Each begins in its ``__init__.py``. `model_shape` has the sizes that cost depends on, `gpus` the limits of the hardware,
`errors` the tree of failures.
"""
