"""Pipeline bubbles: the stages over a few micro-batches, and what larger budgets idle for."""
