"""The family Qwen3-Next: layers with linear attention, and layers with gated attention.

The norms are zero-centered, as in Gemma. The experts are as in Qwen2-MoE. Some settings
in files only affect training, and are not read: ``router_aux_loss_coef``,
``output_router_logits`` and ``attention_dropout``.

References:
    [1] Yang et al., "Gated Delta Networks", 2024, section 3.4,
    https://arxiv.org/abs/2412.06464
"""

from dataclasses import dataclass, replace
from typing import Any

from nnx_parallel.layers.experts.routing import Experts, is_int
from nnx_parallel.models.families import llama, qwen_moe
from nnx_parallel.models.families.deepseek import rows_of_heads
from nnx_parallel.models.families.llama import LLAMA, sized
from nnx_parallel.weights.family import Values, alternate, period_of
from nnx_parallel.weights.names import Entry


@dataclass(frozen=True, kw_only=True)
class DeltaNet:
    """Sizes of linear attention with the gated delta rule [1].

    Attributes:
        num_key_heads: Number of query heads, and of key heads.
        num_value_heads: Number of value heads. Each key head is shared by the same
            number of value heads.
        key_dim: Width of a query and of a key.
        value_dim: Width of a value.
        conv_len: Number of tokens that a convolution sees: the token itself, and the
            tokens before it.

    Raises:
        ValueError: If a size is not an int of at least 1, or if the number of key heads
            does not divide the number of value heads.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_len: int = 4

    def __post_init__(self) -> None:
        for name, found in vars(self).items():
            if not (is_int(found) and found >= 1):
                raise ValueError(
                    f"DeltaNet.{name} is {found!r}; it must be an int of at least 1."
                )
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(
                f"DeltaNet.num_value_heads is {self.num_value_heads}; it must be a "
                f"multiple of num_key_heads={self.num_key_heads}, because each key "
                "head is shared by the same number of value heads."
            )

    @property
    def group(self) -> int:
        """Number of value heads that share a key head."""
        return self.num_value_heads // self.num_key_heads

    def num_weights(self, embed: int) -> int:
        """Returns the number of elements of a layer's kernels, with convolutions.

        ``embed`` is the width of the residual stream.
        """
        keys = self.num_key_heads * self.key_dim
        values = self.num_value_heads * self.value_dim
        dense = embed * (2 * keys + 3 * values + 2 * self.num_value_heads)
        return dense + (2 * keys + values) * self.conv_len


_SIZES = {
    "num_key_heads": "linear_num_key_heads",
    "num_value_heads": "linear_num_value_heads",
    "key_dim": "linear_key_head_dim",
    "value_dim": "linear_value_head_dim",
    "conv_len": "linear_conv_kernel_dim",
}
"""Settings that have the same values as fields of `DeltaNet`."""


def _pattern(of_layers: list[bool]) -> tuple[bool, ...] | None:
    """Returns the shortest pattern of layers, or ``None`` if all layers are alike."""
    same = len(set(of_layers)) == 1
    return None if same else tuple(of_layers[: period_of(of_layers)])


def _read(settings: Values) -> dict[str, Any]:
    count, period = settings["num_hidden_layers"], settings["full_attention_interval"]
    types = [
        "linear_attention" if (i + 1) % period else "full_attention"
        for i in range(count)
    ]
    kinds = llama.read_kinds(settings, types, local="linear_attention")
    found = llama.read(settings, is_partial=True)
    if "local" in kinds:
        sizes = {ours: settings[name] for ours, name in _SIZES.items()}
        found["delta_net"] = DeltaNet(**sizes)
        found["linear_layers"] = _pattern([kind == "local" for kind in kinds])
    step, dense = settings["decoder_sparse_step"], settings["mlp_only_layers"] or ()
    has_experts = [(i + 1) % step == 0 and i not in dense for i in range(count)]
    if not any(has_experts):
        return found
    found |= qwen_moe.read_with_shared(settings)
    if not all(has_experts):
        found["mlp_dim"] = settings["intermediate_size"]
    return found | {"expert_layers": _pattern(has_experts)}


def _write(fields: Values) -> dict[str, Any]:
    count, experts = fields["num_layers"], fields["experts"]
    kinds = {True: "linear_attention", False: "full_attention"}
    is_linear, has_experts = _kinds(fields)
    found = llama.write(fields, is_partial=True)
    if experts is not None:
        found |= qwen_moe.write_mixture(fields)
        found["shared_expert_intermediate_size"] = experts.shared_dim
    if (delta := fields["delta_net"]) is not None:
        found |= {name: getattr(delta, ours) for ours, name in _SIZES.items()}
    return found | {
        "layer_types": [kinds[x] for x in is_linear],
        "mlp_only_layers": [i for i in range(count) if not has_experts[i]],
    }


def _kinds(fields: Values) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
    """Returns which layers have linear attention, and which layers have experts."""
    count = fields["num_layers"]
    is_linear = fields["linear_layers"] or (fields["delta_net"] is not None,) * count
    return is_linear, fields["expert_layers"] or (
        fields["experts"] is not None,
    ) * count


def _names(fields: Values) -> list[Entry]:
    kinds = [*zip(*_kinds(fields), strict=True)]
    return alternate([_block(fields, *kind) for kind in kinds[: period_of(kinds)]])


def _block(fields: Values, is_linear: bool, has_experts: bool) -> list[Entry]:
    """Returns the table of a model in which all blocks have this kind."""
    mlp = qwen_moe.WITH_SHARED if has_experts else llama.MLP
    gate = [qwen_moe.SHARED_GATE] if has_experts else []
    if is_linear:
        plain = {**fields, "qk_norm": False}
        table = llama.names(plain, mlp=mlp, attention={})
        return [*table, *gate, *_linear(fields["delta_net"])]
    names = {"key": "k_proj", "value": "v_proj", "out": "o_proj"}
    attention = {f"attention.{n}": f"self_attn.{x}" for n, x in names.items()}
    table = llama.names(fields, mlp=mlp, attention=attention)
    # For each head, a file has the rows of the query, then the rows of the gate.
    size = fields["head_dim"]
    queries = [
        (
            f"blocks.layer.attention.{name}.kernel",
            "model.layers.{}.self_attn.q_proj.weight",
            rows_of_heads(first, size, 2 * size, "embed"),
        )
        for name, first in (("query", 0), ("gate", size))
    ]
    return [*table, *gate, *queries]


def _linear(delta: DeltaNet) -> list[Entry]:
    """Returns the entries for linear attention."""
    key, value, group = delta.key_dim, delta.group * delta.value_dim, delta.group
    found = [
        ("decay_bias", "dt_bias", "value_heads -> value_heads"),
        ("log_speed", "A_log", "value_heads -> value_heads"),
        ("norm.scale", "norm.weight", "value_dim -> value_dim"),
        ("out.kernel", "out_proj.weight", "embed (heads size) -> heads size embed"),
    ]
    # One kernel of a file holds several kernels of this library, key head by key head.
    fused = {
        "in_proj_qkvz": {"query": key, "key": key, "value": value, "gate": value},
        "in_proj_ba": {"rate": group, "decay": group},
    }
    for theirs, widths in fused.items():
        first, total = 0, sum(widths.values())
        for ours, width in widths.items():
            rows = rows_of_heads(first, width, total, "embed")
            found.append((f"{ours}.kernel", f"{theirs}.weight", rows))
            first += width
    # A file has one convolution for all queries, then all keys, then all values.
    counts = [delta.num_key_heads * width for width in (key, key, value)]
    for i, ours in enumerate(("query_conv", "key_conv", "value_conv")):
        first, last = sum(counts[:i]), sum(counts[: i + 1])
        cut = f"row {first}:{last} of {sum(counts)}: row 1 width -> row width"
        found.append((ours, "conv1d.weight", cut))
    return [
        (f"blocks.layer.attention.{ours}", f"model.layers.{{}}.linear_attn.{theirs}", x)
        for ours, theirs, x in found
    ]


_10_OF_512 = Experts(
    num_experts=512,
    top_k=10,
    mlp_dim=512,
    shared_dim=512,
    shared_gate=True,
    balance_loss=0.001,
)

QWEN3_NEXT = replace(
    LLAMA,
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    parts={
        **LLAMA.parts,
        "zero_centered_norm": True,
        "qk_norm": True,
        "output_gate": True,
    },
    marks=("output_gate", "zero_centered_norm", "qk_norm"),
    defaults={
        **LLAMA.defaults,
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32_768,
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "layer_types": None,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 10,
        "num_experts": 512,
        "norm_topk_prob": True,
    },
    valid={
        name: values
        for name, values in LLAMA.valid.items()
        if name
        not in ("partial_rotary_factor", "decoder_sparse_step", "mlp_only_layers")
    },
    read=_read,
    write=_write,
    names=_names,
    # Published folders also have layers that predict further tokens.
    left_out=lambda settings: r"^mtp\b",
    presets={
        "qwen3-next-80b-a3b": sized(
            {"vocab_size": 151_936, "seq_len": 262_144, "norm_epsilon": 1e-6},
            "48 2048 16 2",
            head_dim=256,
            rotary_dim=64,
            rope_theta=1e7,
            delta_net=DeltaNet(
                num_key_heads=16, num_value_heads=32, key_dim=128, value_dim=128
            ),
            linear_layers=(True, True, True, False),
            experts=_10_OF_512,
        )
    },
)
FAMILIES = (QWEN3_NEXT,)
