"""What a model needs on machines that are not here: counted from shapes, and by the compilers.

`memory` counts what lies on each device, `floor` what a pass must move, `devices` what machines
have; `compiled` and its `worker` compile the real passes for activations and collectives (`hlo`).
"""
