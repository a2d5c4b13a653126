"""The family GPT-2."""

from nnx_parallel.models.families.llama import NEUTRAL, sized
from nnx_parallel.weights.family import Family, Values, block_entries
from nnx_parallel.weights.names import Entry

_LAYERS = {
    "attention.query": "attn.c_attn",
    "attention.key": "attn.c_attn",
    "attention.value": "attn.c_attn",
    "attention.out": "attn.c_proj",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
    "attention_norm": "ln_1",
    "mlp_norm": "ln_2",
}
# One kernel in files holds queries, keys and values. Kernels are (in, out), like ours.
_PATTERNS = {
    name: (
        f"part {i} of 3: embed (n heads head_dim) -> n embed heads head_dim",
        f"part {i} of 3: (n heads head_dim) -> n heads head_dim",
    )
    for i, name in enumerate(("query", "key", "value"))
} | {
    "out": ("(heads head_dim) embed -> heads head_dim embed", "embed -> embed"),
    "up": ("embed mlp -> embed mlp", "mlp -> mlp"),
    "down": ("mlp embed -> mlp embed", "embed -> embed"),
}


def _names(fields: Values) -> list[Entry]:
    found = [
        ("embed.embedding", "transformer.wte.weight", "vocab embed -> vocab embed"),
        ("positions.embedding", "transformer.wpe.weight", "seq embed -> seq embed"),
        *block_entries("transformer.h.{}.", _LAYERS, patterns=_PATTERNS),
        ("norm.scale", "transformer.ln_f.weight", "embed -> embed"),
        ("norm.bias", "transformer.ln_f.bias", "embed -> embed"),
    ]
    head = ("head.kernel", "lm_head.weight", "vocab embed -> embed vocab")
    return found if fields["tied"] else [*found, head]


def _write(fields: Values) -> Values:
    width = fields["mlp_dim"]
    return {
        "n_inner": None if width == 4 * fields["embed_dim"] else width,
        "activation_function": "gelu_new",
    }


_SIZES = {"vocab_size": 50_257, "seq_len": 1024}

GPT2 = Family(
    model="GPT",
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    parts={"positions": "learned"},
    settings={
        "vocab_size": "vocab_size",
        "seq_len": "n_positions",
        "num_layers": "n_layer",
        "embed_dim": "n_embd",
        "num_heads": "n_head",
        "mlp_dim": "n_inner",
        "norm_epsilon": "layer_norm_epsilon",
        "tied": "tie_word_embeddings",
    },
    defaults={"n_inner": None, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
    valid=NEUTRAL | {"activation_function": ("gelu_new",)},
    read=lambda settings: {},
    write=_write,
    names=_names,
    prefix="transformer.",
    # Older versions also saved masks, and the head of tied models.
    ignored=r"\.attn\.(masked_)?bias$|^lm_head\.weight$",
    presets={
        "gpt2": sized(_SIZES, "12 768 12"),
        "gpt2-medium": sized(_SIZES, "24 1024 16"),
        "gpt2-large": sized(_SIZES, "36 1280 20"),
        "gpt2-xl": sized(_SIZES, "48 1600 25"),
    },
)
FAMILIES = (GPT2,)
