"""The configuration of a `GPT`: sizes, counts of parameters and FLOPs, and presets.

References:
    [1] Radford et al., "Language Models are Unsupervised Multitask Learners", 2019.
    [2] Grattafiori et al., "The Llama 3 Herd of Models", 2024, section 3.2,
    https://arxiv.org/abs/2407.21783
    [3] Su et al., "RoFormer", 2021, section 3.2, https://arxiv.org/abs/2104.09864
    [4] Shazeer, "GLU Variants Improve Transformer", 2020,
    https://arxiv.org/abs/2002.05202
    [5] Chowdhery et al., "PaLM", 2022, sections 2 and 5, appendix B,
    https://arxiv.org/abs/2204.02311
    [6] Gemma Team, "Gemma 2", 2024, section 2, https://arxiv.org/abs/2408.00118
    [7] Dehghani et al., "Scaling Vision Transformers to 22 Billion Parameters", 2023,
    section 2, https://arxiv.org/abs/2302.05442
    [8] Gemma Team, "Gemma 3", 2025, section 2, https://arxiv.org/abs/2503.19786
    [9] DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 4.2,
    https://arxiv.org/abs/2412.19437
    [10] OLMo Team, "2 OLMo 2 Furious", 2024, section 3.3,
    https://arxiv.org/abs/2501.00656
    [11] Yang et al., "RoPE to NoPE and Back Again", 2025, section 3,
    https://arxiv.org/abs/2501.18795
    [12] Black et al., "GPT-NeoX-20B", 2022, section 2.1,
    https://arxiv.org/abs/2204.06745
    [13] OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card", 2025, section 2.3,
    https://arxiv.org/abs/2508.10925
    [14] Meta AI, "The Llama 4 herd", 2025,
    https://ai.meta.com/blog/llama-4-multimodal-intelligence/
    [15] DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1,
    https://arxiv.org/abs/2405.04434
    [16] Yang et al., "Gated Delta Networks", 2024, section 3,
    https://arxiv.org/abs/2412.06464
    [17] Qiu et al., "Gated Attention for Large Language Models", 2025, section 2,
    https://arxiv.org/abs/2505.06708
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from nnx_parallel.errors import suggests_names
from nnx_parallel.layers.activations import Activation
from nnx_parallel.layers.attention.kernels import Implementation
from nnx_parallel.layers.experts.routing import Experts, is_int
from nnx_parallel.layers.stack.scan import Remat, check_remat
from nnx_parallel.models.families import (
    deepseek,
    gemma,
    glm,
    gpt2,
    gpt_neox,
    gpt_oss,
    granite,
    llama,
    llama4,
    mistral,
    olmo,
    olmoe,
    phi3,
    qwen,
    qwen3_next,
    qwen_moe,
    smollm3,
)
from nnx_parallel.models.families.deepseek import Latents
from nnx_parallel.models.families.granite import Multipliers
from nnx_parallel.models.families.qwen3_next import DeltaNet
from nnx_parallel.models.rotary import Growth, LongRopeScaling, Scaling
from nnx_parallel.weights.family import (
    WithPresets,
    find_preset,
    read_fields,
    write_settings,
)

_FILES = (
    # A model that does not come from files may fit two families equally well. Then it
    # is written as the later one (`nearest`), for instance as Llama and not as Phi-3.
    *(gpt2, phi3, llama, mistral, qwen, qwen_moe, gemma),
    *(gpt_neox, olmo, smollm3, granite, gpt_oss, olmoe, llama4),
    *(glm, deepseek, qwen3_next),
)
FAMILIES = tuple(
    replace(family, parts={**family.parts, "family": family.model_type})
    for file in _FILES
    for family in file.FAMILIES
)
PRESETS = {
    name: {**family.parts, **fields}
    for family in FAMILIES
    for name, fields in family.presets.items()
}
"""Fields of published models; sizes are taken from each model's ``config.json``."""

Norm = Literal["layer", "rms"]
Positions = Literal["learned", "rope"]
Arrangement = Literal["sequential", "parallel"]
LayerKind = Literal["local", "global"]


_WITHOUT_LATENTS = (
    *("num_kv_heads", "head_dim", "rotary_dim", "rotated_layers", "window", "softcap"),
    *("sinks", "qk_norm", "use_bias", "qkv_bias", "chunk", "query_growth"),
    *("late_qk_norm", "zero_centered_norm", "output_gate"),
)
"""Fields that must be None or False in a model with latent attention."""

_WITHOUT_MEMORY = (
    "latents",
    "window",
    "chunk",
    "rotated_layers",
    "use_bias",
    "qkv_bias",
)
"""Fields that must be None or False in a model with linear attention."""


@suggests_names
@dataclass(frozen=True, kw_only=True)
class GPTConfig(metaclass=WithPresets):
    """Shape of a `GPT`, and the kinds of its parts.

    Attributes:
        vocab_size: Number of tokens.
        seq_len: Length of the longest sequence, which is also the number of learned
            positions.
        num_layers: Number of blocks.
        embed_dim: Width of the residual stream.
        num_heads: Number of query heads.
        num_kv_heads: Number of key heads, and of value heads. Each of them is shared by
            the same number of query heads. ``None`` means one for each query head.
        head_dim: Width of a head; ``None`` means ``embed_dim / num_heads``.
        mlp_dim: Width of the MLP; ``None`` means ``4 * embed_dim``.
        norm: Type of the norms: LayerNorm (``layer``) or RMSNorm (``rms``).
        norm_epsilon: Number that is added to the variance.
        zero_centered_norm: True if an RMSNorm's scale is 1 plus its parameter [6].
        pre_norms: True for norms before attention and before the MLP; without them,
            ``post_norms`` is needed [10].
        post_norms: True for norms after attention and after the MLP [6].
        qk_norm: True for an RMSNorm of queries and keys, before they are rotated [7].
        wide_qk_norm: True if each of these norms is over all heads together [10], and
            not over each head.
        late_qk_norm: True to divide rotated queries and keys by the root of their mean
            square, in the layers that rotate [14]. This norm has no parameters.
        positions: ``learned`` for a table of positions, or ``rope`` for rotation of
            queries and keys [3].
        rotary_dim: Number of features of a head that rotate, from the first [12];
            ``None`` means ``head_dim``.
        rotated_layers: A pattern that repeats over the layers, with True for layers
            that rotate queries and keys [11]; ``None`` means all layers.
        query_growth: Growth of queries with their position in the layers that do not
            rotate [14]; ``None`` means no growth.
        rope_theta: Base of the rotation's wavelengths.
        rope_scaling: Stretching of these wavelengths, a `RopeScaling`, `YarnScaling` or
            `LongRopeScaling`; ``None`` does not stretch them.
        local_rope_theta: Base for local layers. Their wavelengths are then not
            stretched [8]. With ``None``, all layers rotate in the same way.
        activation: Nonlinearity of the MLP (`nnx_parallel.layers.activations`). All
            except ``gelu`` need a third kernel [4].
        exact_gelu: True to compute ``gelu`` exactly instead of approximating it by
            tanh.
        block: In a ``sequential`` block, the MLP runs after attention, and each of them
            has a norm. In a ``parallel`` block, both have the same normed input, and
            their outputs are added [5]. Then they share one gather and one sum under
            tensor parallelism, so there is less to wait for.
        separate_norms: True if attention and MLP of a parallel block have different
            norms of the same input [12].
        use_bias: True if kernels and LayerNorms have biases.
        qkv_bias: True if the kernels of queries, keys and values have biases; ``None``
            takes the value of ``use_bias``.
        tied: True if the embedding is also the kernel of the head.
        scale_embedding: True to multiply embeddings by ``embed_dim ** 0.5`` [6].
        multipliers: Factors of embeddings, outputs and logits; ``None`` means 1.
        dropout: Probability that an output of embedding, attention or MLP is dropped.
        latents: Widths of latent attention [15], which computes keys and values from a
            short vector for each token; ``None`` computes them from the residual
            stream.
        delta_net: Sizes of linear attention [16], which keeps a memory of fixed size
            for each head instead of all keys and values; ``None`` means that all layers
            have softmax attention.
        linear_layers: A pattern that repeats over the layers, with True for layers with
            linear attention, and False for layers with softmax attention. Its length
            must divide ``num_layers``. ``None`` means that all layers have linear
            attention if ``delta_net`` is given.
        output_gate: True to multiply the outputs of softmax attention by the sigmoid of
            a projection of the layer's input [17].
        attention: Implementation of attention; ``None`` takes the platform's fused
            kernel where it fits (`nnx_parallel.layers.attention`).
        attention_scale: Factor of the scores; ``None`` means ``head_dim ** -0.5``.
        window: Number of earlier keys that a query sees, in addition to the key of its
            token; ``None`` means all earlier keys.
        chunk: Each sequence, or each document of a packed sequence, is cut into chunks
            of this length. A query sees only the earlier keys of its chunk [14].
            ``None`` means no chunks. A model has a window or chunks, but not both.
        layer_kinds: A pattern of kinds that repeats over the layers. ``"local"`` layers
            have the window or the chunks, and ``"global"`` layers see all keys [6].
            With ``None``, all layers have the window or the chunks.
        softcap: Bound of attention's scores; ``None`` means no bound.
        sinks: True for one additional, learned logit for each head, which takes part in
            the softmax over keys but has no value [13].
        logit_softcap: Bound of the logits [6]; ``None`` means no bound.
        remat: The values that the backward pass recomputes (`Remat`); ``None`` takes
            the Trainer's value.
        z_loss: Weight of the squared log-normaliser in the loss [5].
        experts: A mixture of experts that replaces each MLP; ``None`` means that all
            layers have an MLP. Its kernels have biases only with `Experts.use_bias`.
        dense_layers: Number of layers at the start that have an MLP of width
            ``mlp_dim`` instead of experts [9].
        expert_layers: A pattern that repeats over the layers, with True for layers with
            experts, and False for layers with an MLP of width ``mlp_dim`` [14]. Its
            length must divide ``num_layers``. ``None`` means that all layers after the
            ``dense_layers`` have experts.
        family: The ``model_type`` of the files from which the model was read. Exported
            files have the same type if this type can represent the other fields. With
            ``None`` they have the most similar type. The model does not depend on it.

    Raises:
        ValueError: If a value is out of range, or if a number does not divide another
            that it must divide.

    Example:
        >>> f"{GPTConfig.gpt2_124m().num_params:,}"
        '124,439,808'
        >>> GPTConfig.tiny(num_kv_heads=2).sizes["kv_heads"]
        2
    """

    vocab_size: int
    seq_len: int
    num_layers: int
    embed_dim: int
    num_heads: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    mlp_dim: int | None = None
    norm: Norm = "layer"
    norm_epsilon: float = 1e-5
    zero_centered_norm: bool = False
    pre_norms: bool = True
    post_norms: bool = False
    qk_norm: bool = False
    wide_qk_norm: bool = False
    late_qk_norm: bool = False
    positions: Positions = "learned"
    rotary_dim: int | None = None
    rotated_layers: tuple[bool, ...] | None = None
    query_growth: Growth | None = None
    rope_theta: float = 10_000.0
    rope_scaling: Scaling | None = None
    local_rope_theta: float | None = None
    activation: Activation = "gelu"
    exact_gelu: bool = False
    block: Arrangement = "sequential"
    separate_norms: bool = False
    use_bias: bool = True
    qkv_bias: bool | None = None
    tied: bool = True
    scale_embedding: bool = False
    multipliers: Multipliers | None = None
    dropout: float = 0.0
    latents: Latents | None = None
    delta_net: DeltaNet | None = None
    linear_layers: tuple[bool, ...] | None = None
    output_gate: bool = False
    attention: Implementation | None = None
    attention_scale: float | None = None
    window: int | None = None
    chunk: int | None = None
    layer_kinds: tuple[LayerKind, ...] | None = None
    softcap: float | None = None
    sinks: bool = False
    logit_softcap: float | None = None
    remat: Remat | None = None
    z_loss: float = 0.0
    experts: Experts | None = None
    dense_layers: int = 0
    expert_layers: tuple[bool, ...] | None = None
    family: str | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        numbers = ("vocab_size", "seq_len", "num_layers", "embed_dim", "num_heads")
        numbers += ("num_kv_heads", "head_dim", "mlp_dim", "window", "chunk")
        numbers += ("rotary_dim",)
        given = {n: v for n in numbers if (v := getattr(self, n)) is not None}
        # Types are checked before ranges, because only numbers can be compared.
        for name, value in {**given, "dense_layers": self.dense_layers}.items():
            if not is_int(value):
                raise ValueError(f"GPTConfig.{name} is {value!r}; it must be an int.")
        literals = {"norm": Norm, "positions": Positions}
        literals |= {"activation": Activation, "block": Arrangement}
        rules = [
            (name, getattr(self, name) in get_args(kind), f"one of {get_args(kind)}")
            for name, kind in literals.items()
        ]
        rules += (
            (
                "attention",
                self.attention in (None, *get_args(Implementation)),
                f"one of {get_args(Implementation)}, or None",
            ),
            ("rope_theta", self.rope_theta > 0, "above 0"),
            ("norm_epsilon", self.norm_epsilon > 0, "above 0"),
            ("dropout", 0 <= self.dropout < 1, "a probability in [0, 1)"),
            ("z_loss", self.z_loss >= 0, "at least 0"),
            (
                "dense_layers",
                0 <= self.dense_layers < self.num_layers,
                f"0 or more and less than num_layers={self.num_layers}",
            ),
            (
                "experts",
                isinstance(self.experts, Experts | None),
                "an Experts(...), or None",
            ),
            (
                "latents",
                isinstance(self.latents, Latents | None),
                "a Latents(...), or None",
            ),
            (
                "delta_net",
                isinstance(self.delta_net, DeltaNet | None),
                "a DeltaNet(...), or None",
            ),
        )
        for name in ("softcap", "logit_softcap", "attention_scale", "local_rope_theta"):
            value = getattr(self, name)
            rules.append((name, value is None or value > 0, "above 0, or None"))
        rules += ((n, v >= 1, "at least 1") for n, v in given.items())
        for name, is_met, rule in rules:
            if not is_met:
                found = getattr(self, name)
                raise ValueError(f"GPTConfig.{name} is {found!r}; it must be {rule}.")
        check_remat(self.remat)
        self._check_heads()
        self._check_patterns()
        self._check_parts()

    def _check_heads(self) -> None:
        heads, kv_heads = self.num_heads, self.sizes["kv_heads"]
        is_divided = self.head_dim is None and self.latents is None
        if is_divided and self.embed_dim % heads:
            raise ValueError(
                f"GPTConfig.num_heads is {heads}, which does not divide "
                f"embed_dim={self.embed_dim}. Set embed_dim to a multiple of {heads}, "
                "or set head_dim."
            )
        if heads % kv_heads:
            divisors = [n for n in range(1, heads + 1) if heads % n == 0]
            raise ValueError(
                f"GPTConfig.num_kv_heads is {kv_heads}, which does not divide "
                f"num_heads={heads}. Each key head must be shared by the same number "
                f"of query heads. Set num_kv_heads to one of {divisors}."
            )
        head_dim = self.sizes["head_dim"]
        if self.rotary_dim is not None:
            if self.rotary_dim % 2 or self.rotary_dim > head_dim:
                raise ValueError(
                    f"GPTConfig.rotary_dim is {self.rotary_dim}; it must be even, "
                    f"because features rotate in pairs, and at most {head_dim=}."
                )
        elif self.positions == "rope" and self._rotary_dim % 2:
            raise ValueError(
                f"GPTConfig.head_dim is {head_dim}, but positions='rope' "
                "rotates features in pairs: head_dim must be even."
            )
        scaling, half = self.rope_scaling, self._rotary_dim // 2
        if isinstance(scaling, LongRopeScaling) and len(scaling.short) != half:
            raise ValueError(
                f"GPTConfig.rope_scaling has {len(scaling.short)} divisors of "
                f"frequencies, but there are {half} frequencies: half the number of "
                "features that rotate."
            )

    def _check_patterns(self) -> None:
        """Checks the patterns that repeat over the layers."""
        kinds = get_args(LayerKind)
        pattern = self.layer_kinds
        if pattern is not None and (not pattern or not set(pattern) <= set(kinds)):
            raise ValueError(
                f"GPTConfig.layer_kinds is {pattern!r}; it must be None, or a tuple "
                f"whose entries are among {kinds}. The tuple is repeated over the "
                "layers."
            )
        rotated = self.rotated_layers
        if rotated is not None and (not rotated or not set(rotated) <= {True, False}):
            raise ValueError(
                f"GPTConfig.rotated_layers is {rotated!r}; it must be None, or a tuple "
                "of bools. The tuple is repeated over the layers."
            )
        count = self.num_layers
        for name in ("expert_layers", "linear_layers"):
            layers = getattr(self, name)
            if layers is None:
                continue
            if set(layers) != {True, False} or count % len(layers):
                raise ValueError(
                    f"GPTConfig.{name} is {layers!r}; it must be None, or a tuple "
                    f"with True and False, of a length that divides num_layers={count}."
                    " The tuple is repeated over the layers."
                )

    def _check_parts(self) -> None:
        if not (self.pre_norms or self.post_norms):
            raise ValueError(
                "GPTConfig.pre_norms is False, which needs post_norms=True: each layer "
                "has a norm."
            )
        rope, experts = self.positions == "rope", self.experts is not None
        has_mlps = self._num_dense > 0
        mlps = (
            "experts=None or dense_layers or expert_layers: the width of experts is "
            "Experts.mlp_dim"
        )
        is_cut = self.window is not None or self.chunk is not None
        first = "dense_layers=0: the pattern covers all layers"
        grows = getattr(self.rope_scaling, "growth", 0.0) > 0
        posts = "block='sequential': the norms follow attention and MLP"
        rules = (
            ("mlp_dim", has_mlps, mlps),
            ("dense_layers", experts, "experts: without them all layers are dense"),
            ("expert_layers", experts, "experts: without them all layers are dense"),
            ("expert_layers", self.dense_layers == 0, first),
            (
                "linear_layers",
                self.delta_net is not None,
                "delta_net: it has the sizes of linear attention",
            ),
            ("chunk", self.window is None, "window=None: a model cannot have both"),
            ("layer_kinds", is_cut, "window or chunk: local layers have it"),
            ("rope_scaling", rope, "positions='rope': it changes the rotation"),
            ("local_rope_theta", self.is_mixed, "layer_kinds: some layers are local"),
            ("local_rope_theta", rope, "positions='rope': it changes the rotation"),
            ("latents", rope, "positions='rope': a part of each key rotates"),
            ("latents", not grows, "rope_scaling without growth of queries"),
            ("zero_centered_norm", self.norm == "rms", "norm='rms': it is an RMSNorm"),
            ("post_norms", self.block == "sequential", posts),
            ("wide_qk_norm", self.qk_norm, "qk_norm: it is a form of this norm"),
            ("separate_norms", self.block == "parallel", "block='parallel'"),
            ("rotary_dim", rope, "positions='rope': these features rotate"),
            ("rotated_layers", rope, "positions='rope': these layers rotate"),
            ("late_qk_norm", rope, "positions='rope': it follows the rotation"),
            (
                "query_growth",
                not all(self.rotated),
                "rotated_layers: queries grow in layers that do not rotate",
            ),
            (
                "exact_gelu",
                self.activation == "gelu" and has_mlps,
                "activation='gelu' in an MLP: experts approximate it",
            ),
        )
        plain = "latents=None: latent attention does not support it"
        rules += tuple((n, self.latents is None, plain) for n in _WITHOUT_LATENTS)
        plain = "delta_net=None: a model with linear attention does not support it"
        rules += tuple((n, self.delta_net is None, plain) for n in _WITHOUT_MEMORY)
        for name, is_met, needed in rules:
            found = getattr(self, name)
            if found not in (None, False) and not is_met:
                raise ValueError(
                    f"GPTConfig.{name} is {found!r}, which needs {needed}."
                )

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer; a layer without a window or chunks is global."""
        is_whole = self.window is None and self.chunk is None
        plain: LayerKind = "global" if is_whole else "local"
        pattern = self.layer_kinds or (plain,)
        return tuple(pattern[i % len(pattern)] for i in range(self.num_layers))

    @property
    def is_mixed(self) -> bool:
        """True if some layers are local and other layers are global."""
        return len(set(self.kinds)) > 1

    @property
    def rotated(self) -> tuple[bool, ...]:
        """True for each layer that rotates, if ``positions`` is ``rope``."""
        pattern = self.rotated_layers or (True,)
        return tuple(bool(pattern[i % len(pattern)]) for i in range(self.num_layers))

    @property
    def with_experts(self) -> tuple[bool, ...]:
        """True for each layer with experts."""
        pattern = self.expert_layers or (self.experts is not None,)
        return tuple(
            bool(pattern[i % len(pattern)]) and i >= self.dense_layers
            for i in range(self.num_layers)
        )

    @property
    def with_memory(self) -> tuple[bool, ...]:
        """True for each layer with linear attention."""
        pattern = self.linear_layers or (self.delta_net is not None,)
        return tuple(bool(pattern[i % len(pattern)]) for i in range(self.num_layers))

    @property
    def sizes(self) -> dict[str, int]:
        """Size of each logical axis."""
        return {
            "embed": self.embed_dim,
            "heads": self.num_heads,
            "kv_heads": self.num_kv_heads or self.num_heads,
            "head_dim": self._head_dim,
            "mlp": self.experts.mlp_dim if self.experts else self._dense_dim,
            "vocab": self.vocab_size,
            "expert": self.experts.num_experts if self.experts else 1,
        }

    @property
    def _head_dim(self) -> int:
        """Width of a query and of a key."""
        if self.latents is not None:
            return self.latents.plain_dim + self.latents.rotary_dim
        return self.head_dim or self.embed_dim // self.num_heads

    @property
    def _rotary_dim(self) -> int:
        """Number of features of a query that rotate."""
        if self.latents is not None:
            return self.latents.rotary_dim
        return self.rotary_dim or self._head_dim

    @property
    def _value_dim(self) -> int:
        return self._head_dim if self.latents is None else self.latents.value_dim

    @property
    def cache_dims(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Heads and features of the two arrays that generation keeps for each token.

        They are keys and values, or latents and rotated keys.
        """
        if self.latents is not None:
            return (1, self.latents.key_dim), (1, self.latents.rotary_dim)
        dims = self.sizes["kv_heads"], self._head_dim
        return dims, dims

    @property
    def _dense_dim(self) -> int:
        return self.mlp_dim or 4 * self.embed_dim

    @property
    def _num_dense(self) -> int:
        """Number of layers without experts."""
        return self.num_layers - sum(self.with_experts)

    @property
    def layer_parts(self) -> tuple[tuple[bool, bool], ...]:
        """Whether each layer has experts, and whether it has linear attention."""
        return tuple(zip(self.with_experts, self.with_memory, strict=True))

    def with_parts(self, has_experts: bool, has_memory: bool) -> GPTConfig:
        """Returns the config of layers with these parts."""
        changes: dict[str, Any] = {}
        if not has_experts and self.experts is not None:
            changes = {"experts": None, "dense_layers": 0, "expert_layers": None}
        if not has_memory and self.delta_net is not None:
            changes |= {"delta_net": None, "linear_layers": None}
        return replace(self, **changes)

    @property
    def num_active_params(self) -> int:
        """Number of parameters that a token uses; experts count if it goes to them."""
        idle = self._num_idle * (self._num_expert_weights + self._num_expert_biases)
        return self.num_params - idle

    @property
    def _num_idle(self) -> int:
        """Number of experts to which a token does not go, in all layers."""
        if (experts := self.experts) is None:
            return 0
        count = self.num_layers - self._num_dense
        return count * (experts.num_experts - experts.top_k)

    @property
    def _num_expert_weights(self) -> int:
        """Number of elements of the kernels of one expert."""
        width = 0 if self.experts is None else self.experts.mlp_dim
        return self._num_kernels * self.embed_dim * width

    @property
    def _num_expert_biases(self) -> int:
        """Number of elements of the biases of one expert."""
        if self.experts is None or not self.experts.use_bias:
            return 0
        return (self._num_kernels - 1) * self.experts.mlp_dim + self.embed_dim

    @property
    def _num_kernels(self) -> int:
        return 2 if self.activation == "gelu" else 3

    @property
    def num_params(self) -> int:
        """Number of parameters."""
        sizes = self.sizes
        embed = sizes["embed"]
        heads = (sizes["heads"] + 2 * sizes["kv_heads"]) * sizes["head_dim"]
        qkv_bias = self.use_bias if self.qkv_bias is None else self.qkv_bias
        norm = embed * (2 if self.norm == "layer" and self.use_bias else 1)
        shares_norm = self.block == "parallel" and not self.separate_norms
        block = norm * ((2 - shares_norm) * self.pre_norms + 2 * self.post_norms)
        normed = sizes["heads"] + sizes["kv_heads"] if self.wide_qk_norm else 2
        attention = normed * sizes["head_dim"] * self.qk_norm + heads * qkv_bias
        attention += embed * self.use_bias + sizes["heads"] * self.sinks
        if (latents := self.latents) is not None:  # norms of latents
            attention += latents.key_dim + (latents.query_dim or 0)
        attention *= self.num_layers - self._num_memories
        if (delta := self.delta_net) is not None:  # decays of heads, and the norm
            own = 2 * delta.num_value_heads + delta.value_dim
            attention += self._num_memories * own
        mlp = embed + self._dense_dim * (self._num_kernels - 1)
        biases = self._num_dense * mlp * self.use_bias
        if (experts := self.experts) is not None and experts.use_bias:
            routed = experts.num_experts * (self._num_expert_biases + 1)
            biases += (self.num_layers - self._num_dense) * routed
        looked_up = 0 if self.tied else sizes["vocab"] * embed
        looked_up += self.seq_len * embed if self.positions == "learned" else 0
        layers = self.num_layers * block + attention + biases
        return self.num_product_params + layers + norm + looked_up

    @property
    def num_product_params(self) -> int:
        """Number of parameters in matmuls, which are all kernels and the head.

        A tied embedding is the head's kernel and counts once. Norms and biases do not
        count. Tables that are only used for lookups do not count either: learned
        positions, and an embedding that is not tied to the head. The kernels of
        convolutions count.
        """
        sizes = self.sizes
        width = sizes["vocab"]
        width += self._num_dense * self._num_kernels * self._dense_dim
        if (experts := self.experts) is not None:
            routed = experts.num_experts * experts.mlp_dim
            mlp = self._num_kernels * (routed + experts.shared_dim)
            mlp += experts.num_experts + experts.shared_gate  # the router and the gate
            width += (self.num_layers - self._num_dense) * mlp
        memories = self._num_memories
        weights = (self.num_layers - memories) * self._num_attention_weights
        if self.delta_net is not None:
            weights += memories * self.delta_net.num_weights(sizes["embed"])
        return sizes["embed"] * width + weights

    @property
    def _num_memories(self) -> int:
        """Number of layers with linear attention."""
        return sum(self.with_memory)

    @property
    def _num_attention_weights(self) -> int:
        """Number of elements of the kernels of one layer's softmax attention."""
        sizes, latents = self.sizes, self.latents
        embed, heads = sizes["embed"], sizes["heads"]
        if latents is None:
            kernels = (2 + self.output_gate) * heads + 2 * sizes["kv_heads"]
            return embed * kernels * sizes["head_dim"]
        source = latents.query_dim or embed
        query = source * heads * sizes["head_dim"]
        query += embed * (latents.query_dim or 0)
        values = heads * latents.value_dim
        keys = latents.key_dim * (heads * latents.plain_dim + values)
        keys += embed * (latents.key_dim + latents.rotary_dim)
        return query + keys + values * embed

    def flops_per_token(self, seq_len: int) -> int:
        """Returns a training step's FLOPs per token, forward and backward, for MFU [5].

        The result is ``6 N + 12 L E T``. N is `num_product_params` without the experts
        to which a token does not go. The second term counts the products of queries
        with keys and of scores with values. L is the number of layers with softmax
        attention, E is the mean width of all keys and of all values together, and T is
        ``seq_len``. The result does not depend on a causal mask, although a mask halves
        the work of a good kernel. It does not depend on remat either. In linear
        attention, a token reads the memory twice and writes it once, which adds ``18
        M`` FLOPs for each layer with M numbers in its memory. The compiled step has
        more, because it computes chunks of tokens.
        """
        attended = self.num_heads * (self._head_dim + self._value_dim) * seq_len
        idle = self._num_idle * self._num_expert_weights
        active = self.num_product_params - idle
        memories = self._num_memories
        counted = 6 * active + 6 * (self.num_layers - memories) * attended
        if (delta := self.delta_net) is None:
            return counted
        numbers = delta.num_value_heads * delta.key_dim * delta.value_dim
        return counted + 18 * memories * numbers

    @property
    def fields(self) -> dict[str, Any]:
        """All fields; ``None`` is replaced by the value that it stands for."""
        sizes, experts = self.sizes, self.experts
        if experts is not None:  # files do not store the settings of experts' training
            training = {"balance_loss": 0.0, "balance_over": "sequence", "z_loss": 0.0}
            if experts.choice_bias:  # files have the bias, but not its rate
                training["bias_rate"] = 0.0
            experts = replace(experts, **training)
        scale = self.attention_scale or sizes["head_dim"] ** -0.5
        return vars(self) | {
            "num_kv_heads": sizes["kv_heads"],
            "head_dim": sizes["head_dim"],
            "mlp_dim": self._dense_dim if self._num_dense else sizes["mlp"],
            "qkv_bias": self.use_bias if self.qkv_bias is None else self.qkv_bias,
            "layer_kinds": self.kinds,
            "expert_layers": self.with_experts if self.expert_layers else None,
            "linear_layers": self.with_memory if self.linear_layers else None,
            "experts": experts,
            "attention_scale": round(scale, 12),
            "rope_theta": self.rope_theta if self.positions == "rope" else None,
            "rotary_dim": self.rotary_dim or sizes["head_dim"],
            "rotated_layers": None if all(self.rotated) else self.rotated,
        }

    def check_length(self, length: int) -> None:
        """Checks that a sequence has a position for each of its tokens.

        Raises:
            ValueError: If the sequence is longer than the learned positions.
        """
        if self.positions == "learned" and length > self.seq_len:
            raise ValueError(
                f"A sequence has {length} tokens, but there are only "
                f"GPTConfig.seq_len={self.seq_len} learned positions. Shorten the "
                "sequence, raise seq_len, or use positions='rope'."
            )

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> GPTConfig:
        """Returns the config of a published model by name, such as ``"qwen3-8b"``.

        Raises:
            ValueError: If no preset has this name; the error lists the names.

        Example:
            >>> f"{GPTConfig.preset('gemma2-2b').num_params:,}"
            '2,614,341,888'
        """
        return replace(cls(**find_preset(name, PRESETS)), **overrides)

    @classmethod
    def tiny(cls, **overrides: Any) -> GPTConfig:
        """Returns a small GPT-2 with bytes as tokens and 0.2 M parameters."""
        base = cls(vocab_size=256, seq_len=64, num_layers=4, embed_dim=64, num_heads=4)
        return replace(base, **overrides)

    @classmethod
    def tiny_llama(cls, **overrides: Any) -> GPTConfig:
        """Returns a Llama of the size of `tiny`; 2 query heads share each key head."""
        parts = llama.LLAMA.parts
        base = cls.tiny(num_kv_heads=2, mlp_dim=128, rope_theta=500_000.0, **parts)
        return replace(base, **overrides)

    @classmethod
    def tiny_experts(cls, **overrides: Any) -> GPTConfig:
        """Returns `tiny_llama` with 8 experts; each token goes to 2 of them."""
        experts = Experts(num_experts=8, top_k=2, mlp_dim=64, bias_rate=0.001)
        return replace(cls.tiny_llama(mlp_dim=None, experts=experts), **overrides)

    @classmethod
    def gpt2_124m(cls, **overrides: Any) -> GPTConfig:
        """Returns GPT-2 small [1]."""
        return cls.preset("gpt2", **overrides)

    @classmethod
    def gpt_1_3b(cls, **overrides: Any) -> GPTConfig:
        """Returns GPT-2 with the size of GPT-3 XL.

        The vocabulary is padded to a multiple of 128.
        """
        base = cls.preset("gpt2", vocab_size=50_304, seq_len=2048)
        sizes = {"num_layers": 24, "embed_dim": 2048, "num_heads": 16}
        return replace(base, **sizes | overrides)

    @classmethod
    def llama3_8b(cls, **overrides: Any) -> GPTConfig:
        """Returns Llama 3 8B [2]."""
        return cls.preset("llama3-8b", **overrides)

    @classmethod
    def llama3_70b(cls, **overrides: Any) -> GPTConfig:
        """Returns Llama 3 70B [2]."""
        return cls.preset("llama3-70b", **overrides)


def config_from_hf(config: Mapping[str, Any], **overrides: Any) -> GPTConfig:
    """Returns the config of a model from its ``config.json``.

    Args:
        config: Content of the file, written by transformers 4 or 5.
        overrides: Fields of the `GPTConfig` to set, such as ``remat``.

    Raises:
        ValueError: If the file describes another type of model, or if a setting is not
            supported, so that the model would compute other numbers.

    Example:
        >>> config = {"model_type": "gpt2", "vocab_size": 50257, "n_positions": 1024}
        >>> config |= {"n_layer": 12, "n_embd": 768, "n_head": 12}
        >>> config_from_hf(config) == GPTConfig.preset("gpt2")
        True
    """
    return replace(GPTConfig(**read_fields(config, FAMILIES)[1]), **overrides)


def config_to_hf(config: GPTConfig) -> dict[str, Any]:
    """Returns the ``config.json`` of a model, for transformers 4.53 and later.

    Fields that only training uses are left out: dropout, remat, the weights of losses,
    and the implementation of attention.

    Raises:
        ValueError: If no model in transformers matches this config.

    Example:
        >>> config_to_hf(GPTConfig.preset("qwen3-8b"))["model_type"]
        'qwen3'
    """
    return write_settings(config, FAMILIES)
