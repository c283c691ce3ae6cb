"""Kernels of the Clover model: each op is a typed entry over named implementations.

Arrays only: nothing here knows Clover configs or meshes. `reference` is the formula in fp32, row
by row; `xla` is the production path. Pallas implementations register beside them.
"""
