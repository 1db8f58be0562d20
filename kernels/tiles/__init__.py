"""Where tiles end, and what that means for the token budget.

`staircase` finds the edges in measured latencies, whatever made them; `tile_report` (`analyse`) turns them into budgets
worth trying and the price of one more token; `config_map` says which tile of our own GEMM wins where, by arithmetic or
measured here. The tile arithmetic itself is beside the kernels, in `ops.gemm_tiles`.
"""
