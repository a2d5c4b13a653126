"""Wrong arguments of Muon and of masks raise errors that state the rule."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from nnx_parallel.errors import OptimizerError
from nnx_parallel.optimizers import by_matrix, decay_mask, muon, muon_dimension_numbers

PARAMS = {
    "bias": jnp.ones(4),
    "plain": jnp.ones((6, 4)),
    "stacked": jnp.ones((2, 4, 6)),
}


def double(matrix: jax.Array) -> jax.Array:
    return 2 * matrix


def test_dimension_numbers_of_another_model_raise() -> None:
    def build(numbers: Any) -> optax.GradientTransformation:
        return muon(0.1, muon_weight_dimension_numbers=numbers)

    rule = "Use muon_dimension_numbers(model), with the same wrt as in the Trainer."
    tree = {"bias": None, "plane": None, "stacked": None}
    differs = (
        "Dimension numbers do not match the parameters: entries without a trained "
        "parameter: 1, such as plane; trained parameters without an entry: 1, such as "
        f"plain. Each trained parameter needs an entry. {rule}"
    )
    kind = (
        "A dimension number is True. Each must be a MuonDimensionNumbers or None. "
        f"{rule}"
    )
    model = (
        "muon_dimension_numbers got a dict. It takes a model. Give the Trainer a "
        "function of the model: optimizer=lambda model: muon(0.02, "
        "muon_weight_dimension_numbers=muon_dimension_numbers(model))."
    )
    for numbers, message in (
        (tree, differs),
        (True, kind),
        (muon_dimension_numbers, model),
    ):
        for tx in (build(numbers), by_matrix(double, numbers)):
            with pytest.raises(OptimizerError, match=re.escape(message)):
                tx.init(PARAMS)
    mask: Any = nnx.Linear
    message = "decay_mask got the class Linear. It takes a model. Give the Trainer"
    with pytest.raises(OptimizerError, match=re.escape(message)):
        decay_mask(mask)


def test_invalid_muon_settings_raise() -> None:
    build: Any = muon
    for arguments, message in (
        (
            {"learning_rate": "0.02"},
            "muon got learning_rate='0.02'. It must be a number",
        ),
        (
            {"learning_rate": 0.1, "adam_learning_rate": "0.02"},
            "muon got adam_learning_rate='0.02'. It must be a number, or an Optax",
        ),
        (
            {"learning_rate": 0.1, "preconditioning": "spectrum"},
            "muon got preconditioning='spectrum'. It must be one of ['frobenius', ",
        ),
    ):
        with pytest.raises(OptimizerError, match=re.escape(message)):
            build(**arguments)
    with pytest.raises(TypeError, match="unexpected keyword argument 'momentum'"):
        build(0.1, momentum=0.9)
