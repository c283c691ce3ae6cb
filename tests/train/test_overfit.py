"""Both streams learn: a small model knows 32 samples by heart after a few hundred steps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clover_jax.diffusion.corrupt import Example, NoiseConfig, make_batch
from clover_jax.diffusion.loss import LossConfig, as_arrays
from clover_jax.env import Env
from clover_jax.model.transformer import param_specs, unstack
from clover_jax.params import initialise
from clover_jax.train.step import OptimiserConfig, init_state, train_step
from tests.model.small import config

CFG = config(full_attention_interval=2, vocab_size=60).replace(num_layers=2, **{"delta.chunk": 16})
STEPS, COUNT = 200, 32


@pytest.mark.slow
def test_32_samples_are_learnt_by_heart():
    """Fresh noise every step, so every mask pattern is learnt, the whole block's included."""
    rng = np.random.default_rng(0)
    words = [i for i in range(5, 50) if i != CFG.mask_token_id]
    draw = lambda n: rng.choice(words, n).tolist()
    rows = [(Example.single(i, draw(5), [*draw(7), 3]),) for i in range(COUNT)]
    optimiser = OptimiserConfig(learning_rate=1e-2, steps=STEPS, warmup=10, decay_share=0.5)
    params = initialise(param_specs(CFG), jax.random.key(0))
    state = init_state(unstack(params), optimiser)
    forbidden = jnp.arange(60) == CFG.mask_token_id
    metrics = []
    for step in range(STEPS):
        batch = make_batch(
            rows, time=13, blocks=1, block=8, pad_id=0, seed=0, epoch=step, noise=NoiseConfig()
        )
        state, found = train_step(
            state, as_arrays(batch), forbidden, jnp.float32(optimiser.rate(step)),
            cfg=CFG, env=Env(moe_tile=64), loss=LossConfig(diffusion=1.0), optimiser=optimiser.rule,
        )  # fmt: skip
        metrics.append(found)
    first, last = jax.device_get(metrics[0]), jax.device_get(metrics[-10:])
    assert first["ar_loss"] > 3.5 and first["diffusion_loss"] > 3.5  # log 59 is 4.08
    mean = {name: np.mean([m[name] for m in last]) for name in first}
    print(mean)
    assert mean["ar_loss"] < 0.02 and mean["ar_accuracy"] > 0.999
    assert mean["diffusion_loss"] < 0.05 and mean["diffusion_accuracy"] > 0.99
