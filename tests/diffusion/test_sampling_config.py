import dataclasses
import json
import math

import jax
import numpy as np
import pytest

from clover_jax.diffusion.sampling_config import (
    RampConfig,
    SamplerConfig,
    SamplerStructure,
    from_generation_config,
    sampler_params,
    to_generation_config,
)
from clover_jax.errors import CloverError

NAN, INF = math.nan, math.inf
RELEASE = {
    "do_sample": False,
    "eos_token_id": [3, 4],
    "presence_penalty": 0.9,
    "repetition_penalty": 1.05,
    "top_k": None,
    "clover": {
        "threshold": 0.9,
        "response_ramp": {"start": 4096, "slope": 0.001},
        "thinking_ramp": {"start": 8192, "slope": 0.001, "cap": 20},
    },
}


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("threshold", [NAN, INF, -0.1, "0.9", None, True, 10**400]),
        ("temperature", [NAN, INF, -1.0, "hot", None, False]),
        ("top_k", [-1, 1.0, "3", None, True, 2**31]),
        ("top_p", [0.0, 1.0001, NAN, -1.0, "1", 1e-40]),
        ("presence", [NAN, -INF, "0", 1e39]),
        ("frequency", [NAN, INF, [], -1e39]),
        ("repetition", [0.0, -1.0, NAN, INF, {}, 1e-40]),
        ("confidence", ["Raw", None, 1, ["raw"]]),
        ("policy", ["rightmost", None, 3]),
        ("steps", [-1, 2.0, None]),
        ("window", [-1, "4", True]),
        ("response_ramp", [3, {"start": 1, "slope": 1.0}]),
        ("thinking_ramp", ["on", (1, 2)]),
    ],
)
def test_bad_values_name_the_field(field, values):
    for value in values:
        with pytest.raises(CloverError, match=f"SamplerConfig {field} is .*expected"):
            SamplerConfig(**{field: value})


@pytest.mark.parametrize(
    "fields",
    [
        {"start": -1, "slope": 1.0},
        {"start": 1.5, "slope": 1.0},
        {"start": 0, "slope": -0.1},
        {"start": 0, "slope": NAN},
        {"start": 0, "slope": 1.0, "cap": INF},
        {"start": 0, "slope": 1.0, "cap": -1.0},
    ],
)
def test_bad_ramps(fields):
    with pytest.raises(CloverError, match=r"RampConfig .* is .*expected"):
        RampConfig(**fields)


def test_config_is_hashable_and_ints_are_numbers():
    a, b = SamplerConfig(threshold=1, temperature=1), SamplerConfig(threshold=1.0, temperature=1.0)
    assert a == b and hash(a) == hash(b) and isinstance(a.threshold, float)
    assert SamplerConfig(threshold=1.1).threshold == 1.1
    assert SamplerConfig(confidence="raw").structure == SamplerStructure(
        "low_confidence", "raw", "resolved"
    )


def test_generation_config_of_the_release():
    config = from_generation_config(RELEASE)
    assert config == SamplerConfig(
        threshold=0.9,
        presence=0.9,
        repetition=1.05,
        response_ramp=RampConfig(start=4096, slope=0.001),
        thinking_ramp=RampConfig(start=8192, slope=0.001, cap=20.0),
    )


def test_an_empty_generation_config_is_neutral():
    assert from_generation_config({}) == SamplerConfig()


@pytest.mark.parametrize(
    ("fields", "temperature"),
    [
        ({"do_sample": False, "temperature": 0.7}, 0.0),
        ({"do_sample": True, "temperature": 0.7}, 0.7),
        ({"do_sample": True}, 1.0),
        ({"temperature": 0.7}, 0.7),
        ({"do_sample": None, "temperature": None}, 0.0),
    ],
)
def test_do_sample_decides_the_temperature(fields, temperature):
    assert from_generation_config(fields).temperature == temperature


@pytest.mark.parametrize(
    "config",
    [
        SamplerConfig(),
        SamplerConfig(policy="entropy", steps=16, window=8),
        SamplerConfig(temperature=0.6, top_k=20, top_p=0.95, confidence="raw", frequency=-0.5),
        from_generation_config(RELEASE),
    ],
)
def test_generation_config_round_trip(config):
    assert from_generation_config(json.loads(json.dumps(to_generation_config(config)))) == config


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ([], "JSON object"),
        (None, "JSON object"),
        ({"do_sample": 1}, "do_sample"),
        ({"do_sample": False, "temperature": "x"}, "temperature"),
        ({"top_k": 1.5}, "top_k"),
        ({"repetition_penalty": 0}, "repetition"),
        ({"clover": 3}, "clover"),
        ({"clover": {"treshold": 0.9}}, "treshold"),
        ({"clover": {"threshold": "0.9"}}, "threshold"),
        ({"clover": {"response_ramp": 4096}}, "response_ramp"),
        ({"clover": {"response_ramp": {"start": 4096}}}, "slope"),
        ({"clover": {"thinking_ramp": {"start": 1, "slope": 1, "stop": 2}}}, "stop"),
    ],
)
def test_bad_generation_config(fields, named):
    with pytest.raises(CloverError, match=named):
        from_generation_config(fields)


def test_params_hold_one_row_per_config():
    ramp = RampConfig(start=3, slope=0.5)
    params = sampler_params(
        [SamplerConfig(threshold=0.5, top_k=2), SamplerConfig(response_ramp=ramp)]
    )
    assert {(x.shape, x.dtype.name) for x in jax.tree.leaves(params)} == {
        ((2,), "float32"),
        ((2,), "int32"),
    }
    np.testing.assert_array_equal(params.threshold, np.float32([0.5, 0.95]))
    np.testing.assert_array_equal(params.top_k, [2, 0])
    np.testing.assert_array_equal(params.response_ramp.start, [0, 3])
    np.testing.assert_array_equal(params.response_ramp.slope, [0, 0.5])
    np.testing.assert_array_equal(params.response_ramp.cap, [np.inf, np.inf])
    for field in dataclasses.fields(SamplerConfig):
        assert hasattr(params, field.name) or hasattr(SamplerConfig().structure, field.name)


def test_rows_of_one_batch_share_their_structure():
    with pytest.raises(CloverError, match="structure"):
        sampler_params([SamplerConfig(), SamplerConfig(confidence="raw")])
    with pytest.raises(CloverError, match="none"):
        sampler_params([])
