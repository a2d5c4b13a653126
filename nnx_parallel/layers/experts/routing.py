"""The settings of a mixture of experts, and the choice of experts for a token.

References:
    [1] Jiang et al., "Mixtral of Experts", 2024, section 2.1,
    https://arxiv.org/abs/2401.04088
    [2] DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 2.1.2,
    https://arxiv.org/abs/2412.19437
    [3] Fedus et al., "Switch Transformers", 2021, section 2.2,
    https://arxiv.org/abs/2101.03961
    [4] Zoph et al., "ST-MoE", 2022, section 3.2, https://arxiv.org/abs/2202.08906
    [5] Yang et al., "Qwen2 Technical Report", 2024, section 2.2.2,
    https://arxiv.org/abs/2407.10671
    [6] Meta AI, "The Llama 4 herd", 2025,
    https://ai.meta.com/blog/llama-4-multimodal-intelligence/
    [7] DeepSeek-AI, "DeepSeek-V2", 2024, section 2.2.2,
    https://arxiv.org/abs/2405.04434
"""

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Literal, TypeGuard, get_args

import jax
import jax.numpy as jnp
from jax import Array

from nnx_parallel.errors import ExpertsError, kind_of, suggests_names

Scores = Literal["softmax", "sigmoid"]
Balanced = Literal["sequence", "batch"]
_COUNTS = ("num_experts", "top_k", "mlp_dim", "shared_dim")
_COUNTS += ("num_groups", "top_groups", "best_of_group")
_FLAGS = ("shared_gate", "use_bias", "normalise", "scales_inputs", "choice_bias")
_NUMBERS = ("scale", "bias_rate", "balance_loss", "z_loss")


@suggests_names
@dataclass(frozen=True, kw_only=True)
class Experts:
    """The settings of a mixture of experts: size, choice and balance.

    Attributes:
        num_experts: Number of experts.
        top_k: Number of experts that a token goes to.
        mlp_dim: Hidden width of an expert.
        shared_dim: Hidden width of an additional MLP that processes every token [2].
            0: no such MLP.
        shared_gate: True to multiply the output of the additional MLP by the sigmoid of
            a linear function of the token [5].
        scores: Function of the router's logits: the ``softmax`` over all experts [1],
            or the ``sigmoid`` of each logit [2].
        use_bias: True if the router and the kernels of the experts have biases.
        normalise: True to scale the weights of a token's experts so that their sum is
            1. With ``top_k=1`` and several experts it must be False, because the weight
            would be constant.
        scale: Factor of the weights.
        scales_inputs: True to multiply the input of an expert by its weight, instead of
            its output [6].
        num_groups: Number of groups of neighbouring experts.
        top_groups: Number of groups from which a token's experts are chosen: the groups
            with the largest sums of their best scores.
        best_of_group: Number of best scores of a group in this sum: 2 in DeepSeek-V3
            [2], and 1 in DeepSeek-V2 [7].
        choice_bias: True for a bias of each expert that is one of the model's weights,
            as in the files of DeepSeek-V3. It is added to the scores when experts are
            chosen. Training changes it only by ``bias_rate``, never by gradients.
        bias_rate: Amount by which the biases of the experts change in each training
            step. The biases are added to the scores when experts are chosen. A bias
            rises if its expert had fewer tokens than the mean, and falls if it had more
            [2]. Tokens are counted over the global batch, in integers, so that the
            biases are the same, bit for bit, on any mesh and with any number of
            microbatches. 0: no biases, or constant ones with ``choice_bias``.
        balance_loss: Weight of a loss that is smallest if all experts have equal
            shares of the tokens. 0: no such loss.
        balance_over: The set of tokens over which shares are computed. ``sequence``:
            each sequence [2], or each document of a packed sequence. Then the loss does
            not depend on the number of microbatches. ``batch``: all tokens of a
            microbatch, on all devices [3]. Then the loss depends on the number of
            microbatches.
        z_loss: Weight of the squared log-normaliser of the router's logits [4].
        capacity_factor: Factor that limits the tokens of an expert. From each sequence,
            or each document of a packed sequence, an expert takes only the first
            ``capacity_factor * seq * top_k / num_experts`` tokens, rounded up. Its
            other tokens are dropped. ``None``: no token is dropped.

    Raises:
        ExpertsError: If a value has the wrong type or is out of range, or if the groups
            leave too few experts.

    Example:
        >>> Experts(num_experts=8, top_k=2, mlp_dim=64).capacity(128) is None
        True
    """

    num_experts: int
    top_k: int
    mlp_dim: int
    shared_dim: int = 0
    shared_gate: bool = False
    scores: Scores = "softmax"
    use_bias: bool = False
    normalise: bool = True
    scale: float = 1.0
    scales_inputs: bool = False
    num_groups: int = 1
    top_groups: int = 1
    best_of_group: int = 2
    choice_bias: bool = False
    bias_rate: float = 0.0
    balance_loss: float = 0.0
    balance_over: Balanced = "sequence"
    z_loss: float = 0.0
    capacity_factor: float | None = None

    def __post_init__(self) -> None:
        # Types are checked first, because a value of a wrong type cannot be compared.
        for name in _COUNTS:
            self._require(name, is_int(getattr(self, name)), "an int")
        for name in _NUMBERS:
            self._require(name, _is_number(getattr(self, name)), "a finite number")
        count, groups, factor = self.num_experts, self.num_groups, self.capacity_factor
        scores, balanced = get_args(Scores), get_args(Balanced)
        rules = (
            ("num_experts", count >= 1, "at least 1"),
            ("top_k", 1 <= self.top_k <= count, f"1 to num_experts={count}"),
            ("mlp_dim", self.mlp_dim >= 1, "at least 1"),
            ("shared_dim", self.shared_dim >= 0, "at least 0"),
            *((n, type(vars(self)[n]) is bool, "True or False") for n in _FLAGS),
            (
                "shared_gate",
                self.shared_dim > 0 or not self.shared_gate,
                "False without shared_dim",
            ),
            ("scores", _is_one_of(self.scores, scores), f"one of {scores}"),
            ("scale", self.scale > 0, "above 0"),
            (
                "num_groups",
                groups >= 1 and count % groups == 0,
                f"a divisor of num_experts={count}",
            ),
            (
                "top_groups",
                1 <= self.top_groups <= groups,
                f"1 to num_groups={groups}",
            ),
            ("best_of_group", self.best_of_group >= 1, "at least 1"),
            ("bias_rate", self.bias_rate >= 0, "at least 0"),
            ("balance_loss", self.balance_loss >= 0, "at least 0"),
            (
                "balance_over",
                _is_one_of(self.balance_over, balanced),
                f"one of {balanced}",
            ),
            ("z_loss", self.z_loss >= 0, "at least 0"),
            (
                "capacity_factor",
                factor is None or (_is_number(factor) and factor > 0),
                "above 0, or None",
            ),
        )
        for name, is_met, rule in rules:
            self._require(name, is_met, rule)
        if self.normalise and self.top_k == 1 < count:
            raise ExpertsError(
                "Experts.normalise is True with top_k=1: the weight of a token's only "
                "expert would always be 1, and the router would get no gradient from "
                "it. Set normalise=False, or top_k to 2 or more."
            )
        if (left := self.top_groups * count // groups) < self.top_k:
            least = -(-self.top_k * groups // count)
            raise ExpertsError(
                f"Experts.top_groups is {self.top_groups}: {self.top_groups} of "
                f"{groups} groups have only {left} experts, but a token goes to "
                f"top_k={self.top_k}. top_groups must be at least {least}."
            )

    def _require(self, name: str, is_met: bool, rule: str) -> None:
        require(f"Experts.{name}", getattr(self, name), is_met, rule)

    @property
    def has_bias(self) -> bool:
        """True if a bias of each expert takes part in the choice of experts."""
        return self.choice_bias or self.bias_rate > 0

    @property
    def has_losses(self) -> bool:
        """True if the mixture adds a balance loss or a z-loss to a model's loss."""
        return self.balance_loss > 0 or self.z_loss > 0

    def capacity(self, seq_len: int) -> int | None:
        """Returns the most tokens that an expert takes from a sequence, or ``None``."""
        if self.capacity_factor is None:
            return None
        share = seq_len * self.top_k / self.num_experts
        # The product is rounded first, because 1.1 * 50 is a little above 55.
        return math.ceil(round(self.capacity_factor * share, 6))

    def choose(self, scores: Array, bias: Array | None) -> tuple[Array, Array]:
        """Chooses the experts of each token, and their weights.

        Args:
            scores: ``(..., experts)``.
            bias: ``(experts,)`` or ``None``. It affects the choice, but not the
                weights.

        Returns:
            The experts, int ``(..., top_k)``, and their weights, ``(..., top_k)``.
        """
        preferred = jax.lax.stop_gradient(scores)
        if bias is not None:
            preferred += jnp.broadcast_to(bias, preferred.shape)
        if self.top_groups < self.num_groups:
            preferred = self._in_best_groups(preferred)
        _, chosen = jax.lax.top_k(preferred, self.top_k)
        weights = jnp.take_along_axis(scores, chosen, axis=-1)
        if self.normalise:
            weights /= jnp.sum(weights, axis=-1, keepdims=True) + 1e-20
        return chosen, weights * self.scale

    def _in_best_groups(self, preferred: Array) -> Array:
        """Replaces scores outside of a token's best groups by minus infinity."""
        # (..., experts) -> (..., groups, experts of a group)
        grouped = preferred.reshape(*preferred.shape[:-1], self.num_groups, -1)
        best, _ = jax.lax.top_k(grouped, min(self.best_of_group, grouped.shape[-1]))
        _, kept = jax.lax.top_k(jnp.sum(best, axis=-1), self.top_groups)
        is_kept = jnp.any(is_equal(kept, self.num_groups), axis=-2)  # (..., groups)
        kept_scores = jnp.where(is_kept[..., None], grouped, -jnp.inf)
        return kept_scores.reshape(preferred.shape)


def require(name: str, found: object, is_met: bool, rule: str) -> None:
    """Raises an error unless a value meets a rule.

    Raises:
        ExpertsError: If ``is_met`` is False. The message states the value and the rule.
    """
    if not is_met:
        shown = "None" if found is None else kind_of(found)
        raise ExpertsError(f"{name} is {shown}; it must be {rule}.")


def is_int(value: object) -> TypeGuard[int]:
    """Returns True for integers, including NumPy's, and False for bools."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_one_of(value: object, valid: tuple[str, ...]) -> bool:
    # The type is checked first, because comparing an array gives no single truth value.
    return isinstance(value, str) and value in valid


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    return math.isfinite(value)


def normalised(scores: Array) -> Array:
    """Divides scores ``(..., experts)`` by their sum, which is 1 for a softmax."""
    return scores / (jnp.sum(scores, axis=-1, keepdims=True) + 1e-20)


def is_equal(chosen: Array, count: int) -> Array:
    """Returns one-hot choices, bool ``(..., top_k, count)``, for ``(..., top_k)``.

    Callers should reduce the result immediately. Then XLA does not materialize it.
    """
    shape = (*chosen.shape, count)
    return chosen[..., None] == jax.lax.broadcasted_iota(jnp.int32, shape, chosen.ndim)
