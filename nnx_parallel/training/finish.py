"""The work that modules do once a step, after all of its microbatches."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from nnx_parallel.metrics import Mean, result_of
from nnx_parallel.sharding.model import arrays_of, flatten, nest
from nnx_parallel.sharding.names import dotted
from nnx_parallel.state import StatePlan


def finish_step(
    plan: StatePlan, params: dict, variables: dict
) -> tuple[dict, dict[str, jax.Array]]:
    """The variables after a whole step, and metrics, of modules that ask for it.

    These modules have a method ``finish_step() -> dict[str, Array | Mean]``, as `MoE`
    does. It runs once for all layers of a `Stack`, on arrays that have a dim for them.
    Among scalars of one name the largest counts; each `Mean` is taken over all modules.
    The name of an array ``(layers,)`` includes its module, ``name/blocks.layer.mlp``,
    and the array goes to loggers that show each layer.
    """
    if not any(hasattr(module, "finish_step") for module in plan.modules):
        return variables, {}
    before = flatten(variables)
    model = plan.model.merge(flatten(params) | before)
    metrics: dict[str, jax.Array] = {}
    means: dict[str, Mean] = {}
    # All processes get all layers, because their loggers read them; a pipeline has
    # split them.
    replicated = plan.layout.sharding(P())
    for path, module in nnx.iter_modules(model):
        for name, x in getattr(module, "finish_step", dict)().items():
            if isinstance(x, Mean):
                means[name] = means[name].merge(x) if name in means else x
            elif x.ndim:
                x = jax.lax.with_sharding_constraint(x, replicated)
                metrics[f"{name}/{dotted(path)}"] = x
            else:
                metrics[name] = jnp.maximum(metrics[name], x) if name in metrics else x
    after = arrays_of(model)
    metrics |= {name: result_of(mean) for name, mean in means.items()}
    return nest({path: after[path] for path in before}), metrics
