"""The configuration of a `Gemma3n`: sizes, number of parameters, and presets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from nnx_parallel.errors import suggests_names
from nnx_parallel.layers.attention.kernels import Implementation
from nnx_parallel.layers.experts.routing import is_int
from nnx_parallel.layers.stack.scan import Remat, check_remat
from nnx_parallel.models.families import gemma3n
from nnx_parallel.models.gpt_config import LayerKind
from nnx_parallel.models.rotary import RopeScaling
from nnx_parallel.weights.family import WithPresets, find_preset

FAMILIES = tuple(
    replace(family, parts={**family.parts, "family": family.model_type})
    for family in gemma3n.FAMILIES
)
PRESETS = {name: x for family in FAMILIES for name, x in family.presets.items()}
"""Fields of published models; sizes are taken from each model's ``config.json``."""

_COUNTS = (
    *("vocab_size", "seq_len", "num_layers", "embed_dim", "num_heads", "num_kv_heads"),
    *("head_dim", "window", "num_streams", "laurel_dim", "layer_vocab_size"),
    "layer_input_dim",
)


@suggests_names
@dataclass(frozen=True, kw_only=True)
class Gemma3nConfig(metaclass=WithPresets):
    """Shape of a `Gemma3n`.

    Attributes:
        vocab_size: Number of tokens.
        seq_len: Length of the longest sequence in pretraining. The model does not
            depend on it.
        num_layers: Number of blocks.
        embed_dim: Width of each residual stream.
        num_heads: Number of query heads.
        num_kv_heads: Number of key heads, and of value heads; divides ``num_heads``.
        head_dim: Width of a head; even, because features rotate in pairs.
        mlp_dim: Width of the MLP of each layer.
        sparsity: Share of the MLP's hidden features that become 0, for each layer. A
            feature stays if its gate exceeds the ``sparsity`` quantile of a normal
            distribution with the mean and variance of the token's gates. 0 keeps all
            features.
        layer_kinds: The kind of each layer. A ``"local"`` layer has the window, and a
            ``"global"`` layer sees all keys.
        num_shared_layers: Number of layers at the end that do not compute keys and
            values. Each uses the keys and values of the last earlier layer of its kind
            that computes them.
        window: Number of earlier keys that a query of a local layer sees, in addition
            to the key of its token.
        rope_theta: Base of the rotation's wavelengths in global layers.
        local_rope_theta: Base of the wavelengths in local layers.
        rope_scaling: Stretching of the wavelengths in global layers.
        norm_epsilon: Number that is added to the mean square in norms.
        num_streams: Number of residual streams. Each layer computes with the first one.
        coefficient_clip: Bound of the learned coefficients that mix the streams in
            training; ``None`` means no bound. In evaluation there is no bound.
        laurel_dim: Rank of the low-rank branch beside attention.
        layer_vocab_size: Number of tokens with an embedding for each layer. Tokens from
            this number on have the embedding of token 0.
        layer_input_dim: Width of these embeddings.
        logit_softcap: Bound of the logits; ``None`` means no bound.
        attention: Implementation of attention, as in `GPTConfig`.
        remat: The values that the backward pass recomputes (`Remat`); ``None`` takes
            the Trainer's value.
        z_loss: Weight of the squared log-normaliser in the loss.
        family: The ``model_type`` of the files from which the model was read.

    Raises:
        ValueError: If a value is out of range, or if ``mlp_dim``, ``sparsity`` or
            ``layer_kinds`` does not have one value for each layer.

    Example:
        >>> f"{Gemma3nConfig.preset('gemma3n-e2b').num_params:,}"
        '4,435,182,688'
    """

    vocab_size: int
    seq_len: int
    num_layers: int
    embed_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_dim: tuple[int, ...]
    sparsity: tuple[float, ...]
    layer_kinds: tuple[LayerKind, ...]
    num_shared_layers: int = 0
    window: int = 511
    rope_theta: float = 1e6
    local_rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm_epsilon: float = 1e-6
    num_streams: int = 4
    coefficient_clip: float | None = 120.0
    laurel_dim: int = 64
    layer_vocab_size: int
    layer_input_dim: int = 256
    logit_softcap: float | None = 30.0
    attention: Implementation | None = None
    remat: Remat | None = None
    z_loss: float = 0.0
    family: str | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        for name, is_met, rule in self._rules():
            if not is_met:
                found = getattr(self, name)
                raise ValueError(
                    f"Gemma3nConfig.{name} is {found!r}; it must be {rule}."
                )
        check_remat(self.remat)

    def _rules(self) -> Iterator[tuple[str, bool, str]]:
        """Yields a field, whether it meets a rule, and the rule. The order matters."""
        for name in _COUNTS:
            found = getattr(self, name)
            yield name, is_int(found) and found >= 1, "an int of at least 1"
        count, heads, kinds = self.num_layers, self.num_heads, get_args(LayerKind)
        fits = heads % self.num_kv_heads == 0
        yield "num_kv_heads", fits, f"a divisor of num_heads={heads}"
        yield "head_dim", self.head_dim % 2 == 0, "even"
        of_layers = {
            "mlp_dim": ("ints of at least 1", lambda x: is_int(x) and x >= 1),
            "sparsity": ("numbers from 0 to less than 1", lambda x: 0 <= x < 1),
            "layer_kinds": (f"kinds among {kinds}", lambda x: x in kinds),
        }
        for name, (kind, is_valid) in of_layers.items():
            found = getattr(self, name)
            is_met = isinstance(found, tuple) and len(found) == count
            rule = f"a tuple of {kind}, one for each of {count} layers"
            yield name, is_met and all(map(is_valid, found)), rule
        shared, is_met = self.num_shared_layers, is_int(self.num_shared_layers)
        rule = f"an int from 0 to less than num_layers={count}"
        yield "num_shared_layers", is_met and 0 <= shared < count, rule
        is_met = {*self.layer_kinds[: count - shared]} == {*self.layer_kinds}
        rule = "so small that each kind of layer occurs before the shared layers"
        yield "num_shared_layers", is_met, rule
        is_met = isinstance(self.rope_scaling, RopeScaling | None)
        yield "rope_scaling", is_met, "a RopeScaling(...), or None"
        kinds = get_args(Implementation)
        yield "attention", self.attention in (None, *kinds), f"one of {kinds}, or None"
        for name in ("rope_theta", "local_rope_theta", "norm_epsilon"):
            yield name, getattr(self, name) > 0, "above 0"
        for name in ("coefficient_clip", "logit_softcap"):
            found = getattr(self, name)
            yield name, found is None or found > 0, "above 0, or None"
        yield "z_loss", self.z_loss >= 0, "at least 0"

    @property
    def first_shared(self) -> int:
        """Index of the first layer that computes no keys and values."""
        return self.num_layers - self.num_shared_layers

    @property
    def runs(self) -> list[range]:
        """The layers of each `Stack`; they may differ in their kind of attention."""
        return gemma3n.runs_of(self.fields)

    @property
    def num_params(self) -> int:
        """Number of parameters."""
        embed, latent, streams = self.embed_dim, self.layer_input_dim, self.num_streams
        width, count = self.head_dim, self.num_layers
        block = embed * (2 * self.num_heads * width + 2 * self.laurel_dim + 2 * latent)
        # Seven norms and one scale have the width of a stream.
        block += 8 * embed + width + embed * streams + streams**2 + streams**3
        pairs = 2 * embed * self.num_kv_heads * width + width
        mlps = 3 * embed * sum(self.mlp_dim)
        inputs = (self.layer_vocab_size + embed) * count * latent + latent
        outer = self.vocab_size * embed + embed + 2 * (streams - 1) * embed**2
        return count * block + self.first_shared * pairs + mlps + inputs + outer

    @property
    def fields(self) -> dict[str, Any]:
        """All fields."""
        return vars(self)

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> Gemma3nConfig:
        """Returns the config of a published model: ``gemma3n-e2b`` or ``gemma3n-e4b``.

        Raises:
            ValueError: If no preset has this name; the error lists the names.
        """
        return replace(cls(**find_preset(name, PRESETS)), **overrides)

    @classmethod
    def tiny(cls, **overrides: Any) -> Gemma3nConfig:
        """Returns the config of a small model, with bytes as tokens and all parts."""
        base = cls(
            vocab_size=256,
            seq_len=64,
            num_layers=6,
            embed_dim=32,
            num_heads=4,
            num_kv_heads=2,
            head_dim=8,
            mlp_dim=(64,) * 6,
            sparsity=(0.5, 0.5, 0.0, 0.0, 0.0, 0.0),
            layer_kinds=("local", "global") * 3,
            num_shared_layers=2,
            window=8,
            laurel_dim=8,
            layer_vocab_size=240,
            layer_input_dim=8,
        )
        return replace(base, **overrides)
