"""Block diffusion: the sampler's pure functions, its loops, the noising of training, the loss."""
