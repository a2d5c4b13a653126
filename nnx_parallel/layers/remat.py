"""Remat policies: which residuals the forward pass keeps, by name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Literal, get_args

import jax

from nnx_parallel.sharding.constrain import saves_all_but_gathers

Remat = Literal["none", "dots", "full"]
"""Recomputation in the backward pass [1].

- ``none``: keep every activation. Gathered parameters are gathered again all the same.
- ``dots``: keep the outputs of products with weights; recompute the rest (norms,
  activation functions, attention scores).
- ``full``: keep the input of each block; recompute the block.

References:
    [1] Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016,
    https://arxiv.org/abs/1604.06174
"""

OVERLAPPED = "overlapped_matmul"
"""Checkpoint name of a product that runs as a ring: it is no single dot to a policy."""

_default: ContextVar[Remat] = ContextVar("remat", default="none")


def check_remat(remat: str | None) -> None:
    """Checks the name of a policy.

    Raises:
        ValueError: If there is no policy of that name.
    """
    if remat is not None and remat not in get_args(Remat):
        raise ValueError(
            f"Unknown remat policy {remat!r}. Policies: {list(get_args(Remat))}, or "
            "None to follow the Trainer's."
        )


@contextlib.contextmanager
def default_remat(remat: Remat) -> Iterator[None]:
    """The policy of every `Stack` traced inside that has none of its own."""
    token = _default.set(remat)
    try:
        yield
    finally:
        _default.reset(token)


def active_remat() -> Remat:
    """The policy that `default_remat` has set."""
    return _default.get()


def apply_remat(
    function: Callable, remat: Remat, *, gathers: bool, prevent_cse: bool
) -> Callable:
    """Wraps a function of arrays so that it keeps what the policy says.

    Args:
        function: A pure function of pytrees of arrays.
        remat: The policy.
        gathers: Whether it gathers parameters; these are never kept.
        prevent_cse: Whether to keep the compiler from merging the recomputation with
            the forward pass. Needless in the body of a scan.
    """
    if remat == "none" and not gathers:
        return function
    policy = {
        # All activations, and no gathered parameter: they would be those of all layers.
        "none": saves_all_but_gathers,
        # Products with weights have no batch dims, those of attention have. A ring is
        # a custom gradient around many small products: known by its name.
        "dots": jax.checkpoint_policies.save_from_both_policies(
            jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
            jax.checkpoint_policies.save_only_these_names(OVERLAPPED),
        ),
        "full": jax.checkpoint_policies.nothing_saveable,
    }[remat]
    # A checkpoint replaces the policies of those inside: put none around a `Stack`.
    return jax.checkpoint(function, policy=policy, prevent_cse=prevent_cse)
