"""Clover-35B-A3B, a block-diffusion language model, in JAX. Start at `README.md`."""
