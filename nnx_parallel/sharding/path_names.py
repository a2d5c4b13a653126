"""Names the dims of arrays by their paths, for models that do not name them."""

import re
from dataclasses import dataclass
from typing import TypeVar

from flax import nnx

from nnx_parallel.errors import ParallelWarning, SpecRankError, warn_user
from nnx_parallel.sharding.names import ArrayInfo, MeshAxes
from nnx_parallel.sharding.nnx_arrays import array_info, holds_one_array
from nnx_parallel.sharding.rules import check_regex, warn_unmatched

Names = tuple[MeshAxes, ...]
Model = TypeVar("Model", bound=nnx.Module)


@dataclass(frozen=True, init=False)
class PathNames:
    r"""Names the dims of arrays with dotted paths that match regular expressions.

    Names are a property of the model, not of a strategy. Call this object on a model,
    concrete or abstract: it writes the names into the metadata of the model's
    Variables, where every strategy reads them, and replaces the names that the model
    gave. A ``Trainer`` takes it as ``names=`` and does not change a built model.

    An array gets the names of the first pair that matches. A pair matches if its regex
    is found in the array's path, and if it has a name for each of the array's dims. A
    pair need not name the ``layers`` of a `Stack`, which already have their name.

    Attributes:
        pairs: ``(regex, names)`` in order, with ``None`` for a dim without a name; the
            regex is searched, not anchored.
        optional: True for a table that serves many models. Then a pair may match no
            array, and an array that the pairs match may have another rank.

    Raises:
        RuleError: If a regex does not compile.
        SpecRankError: If all pairs that match an array have names for another rank.

    Warns:
        ParallelWarning: If a regex matches no array. For an optional table: if no regex
            matches an array, or if all pairs that match an array have another rank.

    Example:
        >>> names = PathNames((r"up\.kernel", ("embed", "mlp")))
        >>> def build(rngs):
        ...     return nnx.Dict(up=nnx.Linear(4, 8, use_bias=False, rngs=rngs))
        >>> names(build(nnx.Rngs(0))).up.kernel.out_sharding
        ('embed', 'mlp')
    """

    pairs: tuple[tuple[str, Names], ...]
    optional: bool = False

    def __init__(self, *pairs: tuple[str, Names], optional: bool = False) -> None:
        for regex, names in pairs:
            # The import makes a long optional table, which few programs use. To compile
            # its regexes costs 10 % of the import, so a call checks them.
            if not optional:
                check_regex("PathNames", regex)
            given = [name for name in names if name is not None]
            if isinstance(names, str) or len(set(given)) < len(given):
                raise ValueError(
                    f"PathNames got {names!r} for {regex!r}. Give a tuple with one "
                    "entry for each dim: None, or a name that occurs once, as in "
                    "('embed', None, 'mlp')."
                )
        object.__setattr__(self, "pairs", tuple((r, tuple(n)) for r, n in pairs))
        object.__setattr__(self, "optional", optional)

    def __call__(self, model: Model) -> Model:
        """Writes the names into a model's metadata, and returns the model."""
        for regex, _ in self.pairs:
            check_regex("PathNames", regex)
        found: set[str] = set()
        misfits: list[tuple[ArrayInfo, list[Names]]] = []
        for path, variable in nnx.to_flat_state(nnx.state(model)):
            # An array outside of Variables has no metadata. Several arrays in one
            # Variable have no separate metadata.
            if not isinstance(variable, nnx.Variable) or not holds_one_array(variable):
                continue
            info = array_info(path, variable)
            matching = [pair for pair in self.pairs if re.search(pair[0], info.path)]
            fitting = (pair for pair in matching if _fits(pair[1], info))
            if (chosen := next(fitting, None)) is not None:
                regex, names = chosen
                found.add(regex)
                is_short = len(names) < len(info.shape)
                names = ("layers", *names) if is_short else names
                # Flax cannot place the array now, since the mesh is not known yet.
                variable.set_metadata(out_sharding=names, eager_sharding=False)
            elif matching:
                found |= {regex for regex, _ in matching}
                misfits.append((info, [names for _, names in matching]))
        self._report(found, misfits)
        return model

    def _report(
        self, found: set[str], misfits: list[tuple[ArrayInfo, list[Names]]]
    ) -> None:
        """Warns about unused pairs; refuses, or warns about, arrays of another rank."""
        for info, names in misfits:
            text = (
                f"`{info.path}` has shape {info.shape}, and none of {names} has a name "
                "for each of its dims"
            )
            if not self.optional:
                raise SpecRankError(f"{text}. Add a pair with as many names as dims.")
            remedy = "It keeps its present names; put another pair in front."
            warn_user(f"{text}. {remedy}", ParallelWarning)
        regexes = [regex for regex, _ in self.pairs]
        idle = [regex for regex in regexes if regex not in found]
        # A model uses only a part of a table that serves many models.
        if not self.optional or not found:
            hint = "strategy.describe(model) lists every path."
            warn_unmatched("Names for paths", idle, hint)


def _fits(names: Names, info: ArrayInfo) -> bool:
    # Experts that `nnx.vmap` has made look like layers.
    are_experts = names[:1] == ("expert",) and len(names) == len(info.shape)
    is_named = names[:1] == ("layers",) or not info.is_stacked or are_experts
    return len(names) + (not is_named) == len(info.shape)


def _pairs(modules: str, leaves: str, *names: str) -> list[tuple[str, Names]]:
    """Returns one pair for each rank that a parameter of these modules can have."""
    regex = rf"(^|\.)({modules}){leaves}$"
    dims = [text.split() for text in names]
    return [(regex, tuple(None if n == "." else n for n in each)) for each in dims]


# A kernel is called ``.kernel`` in Flax's modules and ``.w`` in Tunix's. Kernels of
# experts have one more dim, and may be attributes of the block itself. The codes of a
# quantised kernel (`lora`) have the kernel's names.
_KERNEL, _BIAS = r"\.(kernel(_codes)?|w)", r"(\.bias|_bias)"
_ATTENTION = r"\w*(attn|attention)\w*\.(\w+\.)*"
_KEY_VALUE = r"[kv]_proj|key|value|wk|wv"
_UP = r"gate_proj|up_proj|gate_up_proj|w1|w3|c_fc|fc1|fc_in|linear1|wi|wi_\d"
_DOWN = r"down_proj|w2|fc2|fc_out|linear2|mlp\.c_proj|(mlp|ff|DenseReluDense)\.wo"
_OUT = rf"o_proj|out_proj|wo|{_ATTENTION}(out|proj|c_proj)"

TRANSFORMER_NAMES = PathNames(
    *_pairs(r"q_proj|query|wq", _KERNEL, "embed heads head_dim", "embed heads"),
    *_pairs(r"q_proj|query|wq|q", _BIAS, "heads head_dim", "heads"),
    *_pairs(_KEY_VALUE, _KERNEL, "embed kv_heads head_dim", "embed kv_heads"),
    *_pairs(rf"{_KEY_VALUE}|k|v", _BIAS, "kv_heads head_dim", "kv_heads"),
    # These come first, because T5 gives both of its outputs the name `wo`.
    *_pairs(_DOWN, rf"({_KERNEL})?", "mlp embed", "expert mlp embed"),
    *_pairs(_DOWN, _BIAS, "embed", "expert embed"),
    *_pairs(_OUT, _KERNEL, "heads head_dim embed", "heads embed"),
    *_pairs(_OUT, _BIAS, "embed"),
    # One product computes queries, keys and values. Devices exchange its output to
    # split it into the three.
    *_pairs(rf"{_ATTENTION}(c_attn|qkv|qkv_proj)", _KERNEL, "embed heads"),
    *_pairs(rf"{_ATTENTION}(c_attn|qkv|qkv_proj)", _BIAS, "heads"),
    # Gemma's kernels, with dims in the order of its einsums. `kv_einsum` and
    # `qkv_einsum` hold two and three products along their first dim.
    *_pairs(r"q_einsum", _KERNEL, "heads embed head_dim"),
    *_pairs(r"kv_einsum", _KERNEL, ". kv_heads embed head_dim"),
    *_pairs(r"qkv_einsum", _KERNEL, ". heads embed head_dim"),
    *_pairs(r"attn_vec_einsum", _KERNEL, "heads head_dim embed"),
    *_pairs(_UP, rf"({_KERNEL})?", "embed mlp", "expert embed mlp"),
    *_pairs(_UP, _BIAS, "mlp", "expert mlp"),
    *_pairs(
        r"embedder|embed_tokens|wte|tok_embeddings|token_embed\w*",
        r"(\.\w+)*\.\w*embedding",
        "vocab embed",
    ),
    *_pairs(r"lm_head", _KERNEL, "embed vocab"),
    *_pairs(r"lm_head", _BIAS, "vocab"),
    optional=True,
)
"""Names for the parameters of transformers with the usual names of modules.

The table covers Llama, Qwen, Gemma (Tunix, Bonsai, Flax's example), GPT-2 and ViT, with
kernels that are matrices or have the shapes of einsums. Put additional pairs in front:
``PathNames((r"gate$", ("embed", "expert")), *TRANSFORMER_NAMES.pairs, optional=True)``.
"""
