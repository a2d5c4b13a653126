"""Expert parallelism: the experts of a mixture are split over devices."""

from dataclasses import dataclass
from typing import get_args

from flax import nnx
from jax.sharding import Mesh

from nnx_parallel.collectives.ring import ExpertAxis, TokenExchange
from nnx_parallel.errors import ExpertsError, suggests_names
from nnx_parallel.layers.experts.moe import MoE
from nnx_parallel.sharding.layout import Claims
from nnx_parallel.sharding.names import dotted
from nnx_parallel.sharding.nnx_arrays import names_of, variables_of
from nnx_parallel.sharding.rules import Rules
from nnx_parallel.strategies.base import Strategy


@suggests_names
@dataclass(frozen=True, repr=False)
class ExpertParallel(Strategy):
    """Expert parallelism: the axis ``expert`` splits experts [1].

    A device keeps ``1 / size`` of the experts and of their optimizer state. Outside of
    the experts the axis splits the batch, as `DataParallel` does. With `FSDP` the axis
    also splits the state of all other parameters, and FSDP splits the state of each
    expert. No token is dropped, and the numbers are the same as on one device.

    In an `MoE`, devices exchange the tokens as ``exchange`` selects. Any other mixture
    needs experts in a dim that is named ``expert``, for example by ``names="auto"``.
    The dim is split, and the partitioner chooses the transfers.

    Attributes:
        size: Number of parts, which must divide the number of experts; ``None`` uses
            all remaining devices.
        exchange: How tokens reach their experts. ``gather``: tokens of all devices are
            gathered, each device computes the rows of its experts, and their outputs
            are summed and scattered. ``ragged``: ``jax.lax.ragged_all_to_all`` sends
            each row to the device of its expert and back. It sends less if a token goes
            to fewer experts than there are other devices; JAX does not implement it for
            CPUs. ``None`` takes ``ragged`` if the platform has it and it sends less,
            and otherwise ``gather``; `describe` shows the choice and its reason. With
            either exchange, a device has room for a quarter more rows than an even
            share. If it receives more rows, it computes the remaining rows in further
            rounds, in the forward and in the backward pass.
        rules: Explicit rules for single arrays.

    Raises:
        ValueError: If the exchange is unknown.

    Example:
        >>> from nnx_parallel import Composite, FSDP
        >>> strategy = Composite(ExpertParallel(4), FSDP())
        >>> dict(strategy.make_mesh().shape)
        {'fsdp': 2, 'expert': 4}

    References:
        [1] Lepikhin et al., "GShard", 2020, section 3,
        https://arxiv.org/abs/2006.16668
    """

    size: int | None = None
    exchange: TokenExchange | None = None
    rules: tuple[Rules, ...] = ()

    def __post_init__(self) -> None:
        if self.exchange not in (None, *(valid := list(get_args(TokenExchange)))):
            raise ValueError(
                f"ExpertParallel(exchange={self.exchange!r}): valid values are "
                f"{valid}, or None to choose by platform and shape."
            )

    def claims(self) -> Claims:
        """``expert`` splits the experts, the batch, and the arrays that FSDP splits."""
        return Claims(
            axis_sizes={"expert": self.size},
            batch=("expert",),
            logical={"expert": "expert"},
            experts=ExpertAxis("expert", self.exchange),
            rules=self.rules,
        )

    def check(self, model: nnx.Module, mesh: Mesh) -> None:
        """Refuses a model without experts, or with experts that the axis cannot share.

        Raises:
            ExpertsError: If the model is refused, or if ``exchange`` is ``ragged`` on
                CPUs.
        """
        size = mesh.shape["expert"]
        found = {
            dotted(path): module.experts.num_experts
            for path, module in nnx.iter_modules(model)
            if isinstance(module, MoE)
        }
        for path, variable in variables_of(model):
            if "expert" in (names := names_of(variable)):
                dim = names.index("expert")
                found[dotted(path)] = variable.get_value().shape[dim]
        if not found:
            raise ExpertsError(
                f"{type(model).__name__} has no experts: ExpertParallel splits the "
                "experts of nnx_parallel.layers.MoE, and dims that are named 'expert'. "
                "Without them its axis only splits the batch. Take "
                f"DataParallel({size}) or FSDP({size}) instead; or name the dim of "
                "experts: names='auto', or PathNames((r'up$', ('expert', 'embed', "
                "'mlp')))."
            )
        for path, count in found.items():
            if count % size:
                valid = [n for n in range(1, count + 1) if count % n == 0]
                raise ExpertsError(
                    f"`{path}` has {count} experts, which expert={size} devices cannot "
                    f"share evenly. The size of ExpertParallel can be one of {valid}."
                )
        is_real = isinstance(mesh, Mesh)  # an abstract mesh has no devices
        is_cpu = is_real and mesh.devices.flat[0].platform == "cpu"
        if self.exchange == "ragged" and is_cpu:
            raise ExpertsError(
                "ExpertParallel(exchange='ragged') cannot run on CPUs, for which JAX "
                "has no ragged all-to-all. Take exchange='gather', or None to choose."
            )
