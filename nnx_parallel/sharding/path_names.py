"""Names of dims by path, for models that give none; a table for common transformers."""

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
    r"""Names of dims by regular expression over the dotted path.

    They are a property of the model, not of a strategy: called on a model, concrete or
    abstract, it writes them into the metadata of its Variables, where every strategy
    reads them, in place of those that the model gave. A ``Trainer`` takes them as
    ``names=`` and leaves a built model as it is. For an array the first pair counts
    whose regex is found in its path and that has a name for each of its dims; the
    ``layers`` of a `Stack` are named already.

    Attributes:
        pairs: ``(regex, names)`` in order, with ``None`` for a dim without a name; the
            regex is searched, not anchored.
        optional: A table for many models: pairs that match nothing are no mistake, nor
            are arrays of another rank.

    Raises:
        SpecRankError: If all pairs that match an array have names for another rank.

    Warns:
        ParallelWarning: If a regex matches no array, or an optional table names none.

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
            check_regex("PathNames", regex)  # here, not when a model is named
            given = [name for name in names if name is not None]
            if isinstance(names, str) or len(set(given)) < len(given):
                raise ValueError(
                    f"PathNames got {names!r} for {regex!r}. Give a tuple with one "
                    "name for each dim, each once, or None: ('embed', None, 'mlp')."
                )
        object.__setattr__(self, "pairs", tuple((r, tuple(n)) for r, n in pairs))
        object.__setattr__(self, "optional", optional)

    def __call__(self, model: Model) -> Model:
        """Writes the names into a model's metadata, and returns the model."""
        found: set[str] = set()
        misfits: list[tuple[ArrayInfo, list[Names]]] = []
        for path, variable in nnx.to_flat_state(nnx.state(model)):
            # Arrays in no Variable, or several in one, have no metadata.
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
                # No mesh is known yet, on which Flax could place it now.
                variable.set_metadata(out_sharding=names, eager_sharding=False)
            elif matching:
                found |= {regex for regex, _ in matching}
                misfits.append((info, [names for _, names in matching]))
        self._report(found, misfits)
        return model

    def _report(
        self, found: set[str], misfits: list[tuple[ArrayInfo, list[Names]]]
    ) -> None:
        """Says which pairs name no array, and which arrays have another rank."""
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
        # Each model uses a part of a table for many.
        if not self.optional or not found:
            hint = "strategy.describe(model) lists every path."
            warn_unmatched("Names for paths", idle, hint)


def _fits(names: Names, info: ArrayInfo) -> bool:
    is_named = names[:1] == ("layers",) or not info.is_stacked
    return len(names) + (not is_named) == len(info.shape)


def _pairs(modules: str, leaves: str, *names: str) -> list[tuple[str, Names]]:
    """A pair for each rank that a parameter of these modules has in some models."""
    regex = rf"(^|\.)({modules}){leaves}$"
    dims = [text.split() for text in names]
    return [(regex, tuple(None if n == "." else n for n in each)) for each in dims]


# Kernels are ``.kernel`` in Flax's modules and ``.w`` in Tunix's; kernels of experts
# have one dim more, and may be attributes of the block itself.
_KERNEL, _BIAS = r"\.(kernel|w)", r"(\.bias|_bias)"
_ATTENTION = r"\w*(attn|attention)\w*\.(\w+\.)*"
_KEY_VALUE = r"[kv]_proj|key|value|wk|wv"
_UP = r"gate_proj|up_proj|gate_up_proj|w1|w3|c_fc|fc1|fc_in|linear1"
_DOWN = r"down_proj|w2|fc2|fc_out|linear2|mlp\.c_proj"
_OUT = rf"o_proj|out_proj|wo|{_ATTENTION}(out|proj|c_proj)"

TRANSFORMER_NAMES = PathNames(
    *_pairs(r"q_proj|query|wq", _KERNEL, "embed heads head_dim", "embed heads"),
    *_pairs(r"q_proj|query|wq|q", _BIAS, "heads head_dim", "heads"),
    *_pairs(_KEY_VALUE, _KERNEL, "embed kv_heads head_dim", "embed kv_heads"),
    *_pairs(rf"{_KEY_VALUE}|k|v", _BIAS, "kv_heads head_dim", "kv_heads"),
    *_pairs(_OUT, _KERNEL, "heads head_dim embed", "heads embed"),
    *_pairs(_OUT, _BIAS, "embed"),
    # Three products in one: its output is split into them, and sent around for it.
    *_pairs(rf"{_ATTENTION}(c_attn|qkv|qkv_proj)", _KERNEL, "embed heads"),
    *_pairs(rf"{_ATTENTION}(c_attn|qkv|qkv_proj)", _BIAS, "heads"),
    # Gemma's, in the order of its einsums; two or three products side by side.
    *_pairs(r"q_einsum", _KERNEL, "heads embed head_dim"),
    *_pairs(r"kv_einsum", _KERNEL, ". kv_heads embed head_dim"),
    *_pairs(r"qkv_einsum", _KERNEL, ". heads embed head_dim"),
    *_pairs(r"attn_vec_einsum", _KERNEL, "heads head_dim embed"),
    *_pairs(_UP, rf"({_KERNEL})?", "embed mlp", "expert embed mlp"),
    *_pairs(_UP, _BIAS, "mlp", "expert mlp"),
    *_pairs(_DOWN, rf"({_KERNEL})?", "mlp embed", "expert mlp embed"),
    *_pairs(_DOWN, _BIAS, "embed", "expert embed"),
    *_pairs(
        r"embedder|embed_tokens|wte|tok_embeddings|token_embed\w*",
        r"(\.\w+)*\.\w*embedding",
        "vocab embed",
    ),
    *_pairs(r"lm_head", _KERNEL, "embed vocab"),
    *_pairs(r"lm_head", _BIAS, "vocab"),
    optional=True,
)
"""Names for the parameters of transformers whose modules have the usual names.

It names Llama, Qwen, Gemma (Tunix, Bonsai, Flax's example), GPT-2 and ViT, in matrices
and in the kernels of einsums. Your pairs go in front:
``PathNames((r"gate$", ("embed", "expert")), *TRANSFORMER_NAMES.pairs, optional=True)``.
"""
