"""Frequencies and factors of rotations compared with transformers.

`tests/goldens/make_rope.py` made the goldens.
"""

import json
from pathlib import Path
from typing import Any

import jax
import jax.ad_checkpoint
import jax.numpy as jnp
import numpy as np
import pytest

from nnx_parallel.layers import apply_remat
from nnx_parallel.models import GPTConfig, YarnScaling, config_from_hf, config_to_hf
from nnx_parallel.models.rotary import frequencies, rotate
from nnx_parallel.sharding import using
from nnx_parallel.training.model_flops import one_device

GOLDENS = json.loads((Path(__file__).parent / "goldens" / "rope.json").read_text())
SIZES = {
    "model_type": "llama",
    "vocab_size": 8,
    "num_hidden_layers": 1,
    "intermediate_size": 8,
}


def check(config: GPTConfig, golden: dict[str, Any]) -> None:
    scaling = config.rope_scaling
    assert scaling is not None
    dim, theta = config.sizes["head_dim"], config.rope_theta
    for length, expected in golden["frequencies"].items():
        found = frequencies(dim, theta, scaling, int(length))
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert scaling.amplitude == pytest.approx(golden["amplitude"], rel=1e-12)


@pytest.mark.parametrize("golden", GOLDENS, ids=lambda x: str(x["config"])[88:])
def test_rotation_matches_transformers(golden: dict[str, Any]) -> None:
    config = config_from_hf({**SIZES, **golden["config"]})
    check(config, golden)
    assert config_from_hf(config_to_hf(config)).fields == config.fields
    # transformers 4 has two settings instead of one.
    rope = dict(golden["config"]["rope_parameters"])
    older = {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    sizes = {k: v for k, v in golden["config"].items() if k != "rope_parameters"}
    assert config_from_hf({**SIZES, **sizes, **older}) == config


def test_amplitude_applies_to_features_that_rotate() -> None:
    x = jnp.ones((1, 3, 2, 8))
    positions = jnp.arange(3)
    found = rotate(x, positions, frequencies(4, 10_000.0), 1.5)
    whole = rotate(x[..., :4], positions, frequencies(4, 10_000.0))
    np.testing.assert_allclose(found[..., :4], 1.5 * whole, rtol=1e-6)
    assert (found[..., 4:] == 1).all()


@pytest.mark.parametrize("rotary_dim", [8, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tpu_rotation_matches_bit_for_bit(dtype: str, rotary_dim: int) -> None:
    x, weights = (
        jax.random.normal(jax.random.key(i), (2, 5, 3, 8)).astype(dtype)
        for i in range(2)
    )

    def rotated(x: jax.Array) -> jax.Array:
        return rotate(x, jnp.arange(5), frequencies(rotary_dim, 10_000.0), 1.25)

    def run() -> tuple[jax.Array, jax.Array, str]:
        out, vjp = jax.vjp(rotated, x)
        return out, vjp(weights)[0], str(jax.make_jaxpr(rotated)(x))

    expected, expected_grad, halves = run()
    with using(one_device("tpu")):
        found, grad, product = run()
    assert "dot_general" in product
    assert "dot_general" not in halves
    np.testing.assert_array_equal(found, expected)
    # In bfloat16, each of the two terms of the gradient is rounded before their sum.
    tolerance = 0 if dtype == "float32" else 2**-7
    found, expected = grad.astype("float32"), expected_grad.astype("float32")
    np.testing.assert_allclose(found, expected, rtol=0, atol=4 * tolerance)


def test_remat_of_dots_does_not_keep_the_product_of_a_rotation(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def block(x: jax.Array) -> jax.Array:
        return jnp.sin(rotate(x, jnp.arange(5), frequencies(8, 10_000.0))).sum()

    with using(one_device("tpu")):
        jax.ad_checkpoint.print_saved_residuals(
            apply_remat(block, "dots"), jnp.ones((2, 5, 3, 8))
        )
    (kept,) = capsys.readouterr().out.splitlines()
    assert kept == "f32[2,5,3,8] from the argument x"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"factor": 0.0}, "YarnScaling.factor is 0.0; it must be above 0"),
        ({"fast": 0.5}, "YarnScaling.fast is 0.5; it must be at least slow=1.0"),
        ({"attention_factor": 0.0}, "attention_factor is 0.0.*above 0, or None"),
    ],
)
def test_invalid_yarn_raises(change: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        YarnScaling(**{"factor": 2.0, "original_len": 64, **change})
