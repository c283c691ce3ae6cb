"""The network: layers as pure functions over parameter trees.

Letters of the einsums: r batch row, t time, b block, i/j position in a block, d model width,
h head, k key channel, v value channel, c channel, e expert, f expert width.
"""
