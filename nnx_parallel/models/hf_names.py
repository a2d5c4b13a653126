"""Names of the arrays of a `GPT` in the files of transformers, family by family.

An entry is ``(our path, their name, pattern)``. ``{}`` in their name is the number of
the layer, which is the first dim of our array; a second ``{}`` is the number of the
expert, the next dim. The pattern, of einops, makes their array ours; dims have the
names of `GPTConfig.sizes`. In front of it, ``part 1 of 3:`` says that their array holds
three of our arrays along the first dim of the result, ``n``.
"""

from nnx_parallel.models.gpt_config import GPTConfig

Entry = tuple[str, str, str]

_VECTOR = "embed -> embed"
_KERNELS = {
    "query": "(heads head_dim) embed -> embed heads head_dim",
    "key": "(kv_heads head_dim) embed -> embed kv_heads head_dim",
    "value": "(kv_heads head_dim) embed -> embed kv_heads head_dim",
    "out": "embed (heads head_dim) -> heads head_dim embed",
    "up": "mlp embed -> embed mlp",
    "gate": "mlp embed -> embed mlp",
    "down": "embed mlp -> mlp embed",
}
_BIASES = {
    "query": "(heads head_dim) -> heads head_dim",
    "key": "(kv_heads head_dim) -> kv_heads head_dim",
    "value": "(kv_heads head_dim) -> kv_heads head_dim",
}
_LAYER = "blocks.layer."
_TABLE = "vocab embed -> vocab embed"


def names_of(config: GPTConfig) -> tuple[Entry, ...]:
    """The entries of all parameters of a model.

    Example:
        >>> names_of(GPTConfig.preset("llama3-8b"))[0]
        ('embed.embedding', 'model.embed_tokens.weight', 'vocab embed -> vocab embed')
    """
    is_gpt2 = config.nearest_type == "gpt2"
    return _of_gpt2(config) if is_gpt2 else _of_llama(config)


def ignored_names(config: GPTConfig) -> str:
    """A regex for arrays in files that a model does not need.

    These are masks and frequencies that older versions saved, and the head of a tied
    model.
    """
    tied = [r"^lm_head\.weight$"] if config.tied else []
    return "|".join((r"\.attn\.(masked_)?bias$", r"rotary_emb\.inv_freq$", *tied))


def _of_llama(config: GPTConfig) -> tuple[Entry, ...]:
    theirs = "model.layers.{}."
    attention, mlp = f"{_LAYER}attention.", f"{_LAYER}mlp."
    found: list[Entry] = [("embed.embedding", "model.embed_tokens.weight", _TABLE)]
    heads = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "o_proj"}
    for ours, name in heads.items():
        path = f"{theirs}self_attn.{name}."
        found.append((f"{attention}{ours}.kernel", f"{path}weight", _KERNELS[ours]))
        if config.qkv_bias and ours in _BIASES:
            found.append((f"{attention}{ours}.bias", f"{path}bias", _BIASES[ours]))
    if config.experts is not None:
        found += _of_experts(config)
    else:
        for ours in ("up", "gate", "down"):
            name = f"{theirs}mlp.{ours}_proj.weight"
            found.append((f"{mlp}{ours}.kernel", name, _KERNELS[ours]))
    norms = {"attention_norm": "input", "mlp_norm": "post_attention"}
    if config.post_norms:
        norms = {
            "attention_norm": "input",
            "attention_post_norm": "post_attention",
            "mlp_norm": "pre_feedforward",
            "mlp_post_norm": "post_feedforward",
        }
    for ours, name in norms.items():
        path = f"{theirs}{name}_layernorm.weight"
        found.append((f"{_LAYER}{ours}.scale", path, _VECTOR))
    if config.qk_norm:
        pattern = "head_dim -> head_dim"
        for ours, name in (("query", "q"), ("key", "k")):
            path = f"{theirs}self_attn.{name}_norm.weight"
            found.append((f"{attention}{ours}_norm.scale", path, pattern))
    found.append(("norm.scale", "model.norm.weight", _VECTOR))
    if not config.tied:
        found.append(("head.kernel", "lm_head.weight", "vocab embed -> embed vocab"))
    return tuple(found)


def _of_experts(config: GPTConfig) -> list[Entry]:
    """The entries of the MLPs of Mixtral and Qwen3-MoE."""
    is_mixtral = config.nearest_type == "mixtral"
    path = "model.layers.{}." + ("block_sparse_moe" if is_mixtral else "mlp")
    mixtral = {"up": "w3", "gate": "w1", "down": "w2"}
    names = mixtral if is_mixtral else {ours: f"{ours}_proj" for ours in mixtral}
    mlp, router = f"{_LAYER}mlp.", "expert embed -> embed expert"
    found = [(f"{mlp}router", f"{path}.gate.weight", router)]
    for ours, name in names.items():
        theirs = f"{path}.experts.{{}}.{name}.weight"
        found.append((f"{mlp}{ours}", theirs, _KERNELS[ours]))
    return found


def _of_gpt2(config: GPTConfig) -> tuple[Entry, ...]:
    layer, theirs = f"{_LAYER}", "transformer.h.{}."
    found: list[Entry] = [
        ("embed.embedding", "transformer.wte.weight", _TABLE),
        ("positions.embedding", "transformer.wpe.weight", "seq embed -> seq embed"),
    ]
    # One kernel holds queries, keys and values; kernels are (in, out), like ours.
    for i, ours in enumerate(("query", "key", "value")):
        part, path = f"part {i} of 3: ", f"{theirs}attn.c_attn."
        shape = "embed (n heads head_dim) -> n embed heads head_dim"
        kernel = f"{layer}attention.{ours}.kernel"
        found.append((kernel, f"{path}weight", part + shape))
        shape = "(n heads head_dim) -> n heads head_dim"
        bias = f"{layer}attention.{ours}.bias"
        found.append((bias, f"{path}bias", part + shape))
    out = "(heads head_dim) embed -> heads head_dim embed"
    dense = {
        "attention.out": ("attn.c_proj", out),
        "mlp.up": ("mlp.c_fc", "embed mlp -> embed mlp"),
        "mlp.down": ("mlp.c_proj", "mlp embed -> mlp embed"),
    }
    for ours, (name, pattern) in dense.items():
        found.append((f"{layer}{ours}.kernel", f"{theirs}{name}.weight", pattern))
        bias = "mlp -> mlp" if ours == "mlp.up" else _VECTOR
        found.append((f"{layer}{ours}.bias", f"{theirs}{name}.bias", bias))
    norms = {
        f"{layer}attention_norm": f"{theirs}ln_1",
        f"{layer}mlp_norm": f"{theirs}ln_2",
        "norm": "transformer.ln_f",
    }
    for ours, name in norms.items():
        found.append((f"{ours}.scale", f"{name}.weight", _VECTOR))
        found.append((f"{ours}.bias", f"{name}.bias", _VECTOR))
    if not config.tied:
        found.append(("head.kernel", "lm_head.weight", "vocab embed -> embed vocab"))
    return tuple(found)
