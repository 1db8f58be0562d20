"""What a compiler says of the Triton kernels, for GPUs that are not here.

`matrix` lists every kernel in every configuration as a `variants.Variant`. `compiler` compiles these in worker
processes and keeps the facts. `report` adds occupancy, tiles and waves, and is the command
``python -P -m tilebudget.kernels.inspect``, which writes kernels/COMPILED.md.
"""
