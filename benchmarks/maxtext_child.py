"""MaxText's training step, compiled for TPUs without TPUs.

The python of MaxText's environment runs this file, so it imports nothing of this
project. The step is the one that MaxText's `train_compile` builds.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def main(request: dict, out: Path) -> None:
    """Compiles one step, and writes its text; prints memory and chips as JSON.

    Args:
        request: ``overrides`` of MaxText's configuration, ``options`` of the compiler.
        out: The file to which the text is written.
    """
    import jax
    import maxtext
    from maxtext.trainers.pre_train import (  # pyright: ignore[reportMissingImports]
        train_compile,
    )

    # MaxText's entry point sets this value.
    jax.config.update("jax_default_prng_impl", "unsafe_rbg")
    base = Path(maxtext.__file__).parent / "configs" / "base.yml"
    config = train_compile.pyconfig.initialize(["", str(base), *request["overrides"]])
    mesh = train_compile.get_topology_mesh(config)
    args, kwargs, shardings, _, model = train_compile.get_shaped_inputs(mesh, config)
    tools = train_compile.sharding
    params, shardings = tools.maybe_update_params_sharding_with_opt(config, shardings)
    inputs = tools.build_zero1_input_state_mesh_shardings(config, shardings, params)
    step, ins, outs, static, donated = (
        train_compile.maxtext_utils.get_functional_train_with_signature(
            train_compile.train.train_step,
            tools.get_input_data_sharding(config, mesh),
            inputs,
            model,
            config,
            params,
        )
    )
    jitted = jax.jit(
        step,
        in_shardings=ins,
        out_shardings=outs,
        static_argnums=static,
        donate_argnums=donated,
    )
    with jax.set_mesh(mesh), train_compile.axis_rules(config.logical_axis_rules):
        lowered = jitted.lower(*args, **kwargs)
    start = time.perf_counter()
    compiled = lowered.compile(compiler_options=request["options"])
    seconds = time.perf_counter() - start
    out.write_text(compiled.as_text() or "")
    memory: Any = compiled.memory_analysis()
    figures = {
        "temporaries": memory.temp_size_in_bytes,
        "state": memory.argument_size_in_bytes,
        "seconds": seconds,
        "places": [device.coords for device in mesh.devices.flat],
    }
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    os.environ |= {"DECOUPLE_GCLOUD": "TRUE", "TRANSFORMERS_VERBOSITY": "error"}
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
