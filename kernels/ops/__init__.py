"""The Triton kernels.

A file is an operation: `gemm`, `attention`, `rotary`, `norm`, `activation`. Each holds, in this order, the PyTorch
reference, the kernel, the launcher that checks its tensors (`launch`), and what a call computes and moves (`cost`).
`gemm_tiles` and `attention_tiles` declare the tile configurations and pick one for a device. `tolerances` says how far
a kernel may be from its reference.
"""
