"""The forward pass of a real model: shapes and weights, the operations in torch and Triton, attention over KV pages."""
