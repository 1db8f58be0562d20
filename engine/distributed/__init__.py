"""A model over several processes: pipeline stages and tensor-parallel ranks, and the executor that drives them."""
