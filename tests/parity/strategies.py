"""The strategies of the parity tests; each takes a model's rules."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax

from nnx_parallel import FSDP, Composite, DataParallel, Strategy, TensorParallel
from nnx_parallel.mesh import Device
from nnx_parallel.sharding import Rules
from nnx_parallel.sharding.rules import ZeroKind
from tests.parity.models import Case


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A strategy whose rules depend on the model.

    Attributes:
        make: Makes the strategy from a model's rules.
        params_parts: Number of parts that the stored parameters are split into, on
            every model; ``None`` if that depends on the model's names and rules.
        optimizer_parts: Number of parts of the optimizer state.
    """

    make: Callable[[tuple[Rules, ...]], Strategy]
    params_parts: int | None = None
    optimizer_parts: int | None = None

    def strategy(self, case: Case | None = None) -> Strategy:
        """The strategy, with the rules that the case's model needs."""
        if case is None:
            return self.make(())
        has_tensor = "tensor" in self.make(()).axis_sizes
        return self.make(case.tensor_rules if has_tensor else case.other_rules)

    def devices(self) -> Sequence[Device]:
        """The first devices, as many as the strategy covers."""
        sizes = self.make(()).axis_sizes.values()
        return jax.devices()[: math.prod(size or 1 for size in sizes)]


def fsdp(size: int, shard: ZeroKind = "params", rules: tuple[Rules, ...] = ()) -> FSDP:
    """FSDP that also splits the smallest arrays."""
    return FSDP(size, shard=shard, min_size=0, rules=rules)


ONE_DEVICE = Plan(make=lambda rules: DataParallel(1, rules=rules))

PLANS = {
    "dp8": Plan(
        make=lambda rules: DataParallel(8, rules=rules),
        params_parts=1,
        optimizer_parts=1,
    ),
    "fsdp8": Plan(
        make=lambda rules: fsdp(8, "params", rules), params_parts=8, optimizer_parts=8
    ),
    "fsdp8_gradients": Plan(
        make=lambda rules: fsdp(8, "gradients", rules),
        params_parts=1,
        optimizer_parts=8,
    ),
    "fsdp8_optimizer": Plan(
        make=lambda rules: fsdp(8, "optimizer", rules),
        params_parts=1,
        optimizer_parts=8,
    ),
    "tp2": Plan(make=lambda rules: TensorParallel(2, rules=rules)),
    "tp4": Plan(make=lambda rules: TensorParallel(4, rules=rules)),
    "dp2_fsdp4": Plan(
        make=lambda rules: Composite(DataParallel(2), fsdp(4), rules=rules),
        params_parts=4,
        optimizer_parts=4,
    ),
    "fsdp4_tp2": Plan(
        make=lambda rules: Composite(fsdp(4), TensorParallel(2), rules=rules)
    ),
    "dp2_fsdp2_tp2": Plan(
        make=lambda rules: Composite(
            DataParallel(2), fsdp(2), TensorParallel(2), rules=rules
        )
    ),
}
