"""Contents of a checkpoint: groups of arrays and a header, and checks of both.

The header records the user's metadata, and contents that Orbax refuses or hides: empty
groups and random keys. It is saved as Orbax's ``custom_metadata``, which is JSON. A
dict saved as a separate part would become a tree of arrays.

Parameters that are not trained may be saved only as checksums. Adapters are small, but
their base model is large. With ``Checkpoint(frozen="checksum")`` the arrays
of the base are not written. Instead the header has their shapes, and the file of
checksums has one number for each of them, in a separate group. A run that restores such
a checkpoint must provide the same base, bit for bit.
"""

import dataclasses
import difflib
import json
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from nnx_parallel.checkpoint.checksum import digest
from nnx_parallel.checkpoint.files import (
    METADATA,
    PART,
    is_foreign,
    matches,
)
from nnx_parallel.checkpoint.orbax_compat import can_write
from nnx_parallel.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointFormatError,
    CheckpointMismatchError,
)
from nnx_parallel.files import MAX_BYTES, parse_object
from nnx_parallel.sharding.checksum import Checksums, checksums
from nnx_parallel.sharding.names import path_of
from nnx_parallel.sharding.offload import HOST
from nnx_parallel.state import TrainState

Groups = Mapping[str, Mapping[str, jax.Array]]
AbstractGroups = Mapping[str, Mapping[str, jax.ShapeDtypeStruct]]
T = TypeVar("T")

BASE = "base"  # the group of checksums without arrays

Base = Callable[[], Mapping[str, jax.Array]]
"""Returns the arrays of a run's model by path; each call builds them."""

_FORMAT = 3  # increases when a change would make an older reader misread the files
_HEADER = {
    "sizes": {"*": int},
    "keys": {"*": {"*": str}},
    "arrays": {"*": {"*": str}},
    "metrics": {"*": int | float},
    "meta": dict,
}

_RESERVED = ("metrics", PART)  # names of parts that are not groups


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredCheckpoint:
    """The contents of one checkpoint, without its arrays.

    ``groups`` has the global shape and dtype of each array, by group and path.
    ``metrics`` is empty if no metrics were saved. ``base`` has the dtypes and shapes of
    arrays that were saved only as checksums.
    """

    step: int
    groups: dict[str, dict[str, jax.ShapeDtypeStruct]]
    meta: dict[str, Any]
    metrics: dict[str, float]
    checksums: Checksums
    base: dict[str, str] = dataclasses.field(default_factory=dict)


# The layout on disk does not depend on the strategy. All arrays of the model are in one
# group, whether they are trained or not. So a run that trains another part of the model
# finds all arrays.
_GROUPS = {"params": "model", "variables": "model", "opt_state": "optimizer"}
_PROGRESS = ("step", "key", "loss_scale")  # one group; other fields are separate groups


def to_groups(state: TrainState) -> dict[str, dict[str, Any]]:
    """Returns the arrays of a state, concrete or abstract, by group and dotted path."""
    groups: dict[str, dict[str, Any]] = {"model": {}, "optimizer": {}, "progress": {}}
    for keys, leaf in jax.tree_util.tree_leaves_with_path(state):
        group, path = _place(keys)
        groups.setdefault(group, {})[path] = leaf
    return groups


def from_groups(state: TrainState, groups: Groups) -> TrainState:
    """Returns the state with the arrays of the given groups; the rest is unchanged.

    If the group ``ema`` is missing, a moving average starts from the parameters.
    """

    def find(keys: tuple[Any, ...], leaf: Any) -> Any:
        group, path = _place(keys)
        return groups[group][path] if group in groups else leaf

    found = jax.tree_util.tree_map_with_path(find, state)
    return found if "ema" in groups else found.with_new_average()


def _place(keys: tuple[Any, ...]) -> tuple[str, str]:
    field: str = keys[0].name
    if field in _PROGRESS:
        return "progress", path_of(keys)
    return _GROUPS.get(field, field), path_of(keys[1:])


def check_groups(groups: Groups | AbstractGroups, kind: type = jax.Array) -> None:
    """Raises ``CheckpointError`` unless every leaf is an array that can be saved.

    ``kind`` is ``jax.ShapeDtypeStruct`` for groups of a state that does not exist yet.
    """
    if not any(groups.values()):
        raise CheckpointError("Nothing to save: no group holds an array.")
    for name, group in groups.items():
        if not name.isidentifier() or name in _RESERVED:
            raise CheckpointError(
                f"Cannot save a group named {name!r}: a name must be a Python "
                f"identifier other than {', '.join(map(repr, _RESERVED))}."
            )
        for path, array in group.items():
            if not isinstance(array, kind):
                problem = f"found {type(array).__name__}; only jax.Array can be saved."
            elif isinstance(array, jax.Array) and array.is_deleted():
                problem = "it was donated. Save the step's output, not its input."
            elif 0 in array.shape:
                # Orbax would refuse the array in the middle of a save
                # (library-notes.md, "Orbax: contents").
                problem = (
                    f"its shape {array.shape} has no elements. Leave empty arrays out."
                )
            elif not can_write(array.dtype):
                problem = (
                    f"checkpoint files cannot hold dtype {array.dtype.name}. Keep it "
                    "in the model as another dtype that holds its values, such as "
                    "uint8 or bfloat16, and cast it where it is used."
                )
            else:
                continue
            raise CheckpointError(f"Cannot save `{path}` of group {name!r}: {problem}")


def to_write(groups: Groups) -> dict[str, dict[str, jax.Array]]:
    """Returns the groups without empty ones, safe to write while the next steps run.

    Orbax copies arrays with ``np.asarray`` before a save returns. For an array in host
    memory, ``np.asarray`` gives a view instead of a copy. A step that gets the array as
    a donated argument would overwrite that memory, or could not reuse it. So arrays in
    host memory are copied within host memory, one shard at a time.
    """
    return {
        name: {path: _copy_if_on_host(x) for path, x in group.items()}
        for name, group in groups.items()
        if group
    }


def _copy_if_on_host(x: jax.Array) -> jax.Array:
    if x.sharding.memory_kind != HOST:
        return x
    # JAX can copy an entire array only if this process can address all of it.
    shards = [
        jax.device_put(shard.data, shard.data.sharding, may_alias=False)
        for shard in x.addressable_shards
    ]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)


def make_header(
    step: int,
    groups: Groups,
    meta: Mapping[str, Any],
    metrics: Mapping[str, float],
    base: Mapping[str, jax.Array],
) -> dict[str, Any]:
    """Returns the header that is saved with the arrays, as JSON values."""
    # JSON turns tuples into lists. The metadata is converted to JSON and back here, so
    # that the hash is of the values that a reader will see.
    try:
        meta = json.loads(json.dumps(meta))
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"Cannot save the metadata: {error}. It may hold only JSON values: dict, "
            "list, str, int, float, bool and None."
        ) from error
    header = {
        "format": _FORMAT,
        "step": int(step),  # a directory may be renamed or copied
        # This includes empty groups, which Orbax refuses: only the header knows them.
        "sizes": {name: len(group) for name, group in groups.items()},
        # Orbax shows keys as uint32 words (docs/library-notes.md, "Orbax: contents").
        "keys": {
            name: {
                path: str(jax.random.key_impl(array))
                for path, array in group.items()
                if jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
            }
            for name, group in groups.items()
        },
        "arrays": {
            name: {path: spell(array) for path, array in group.items()}
            for name, group in groups.items()
        },
        "metrics": dict(metrics),
        "meta": meta,
    }
    if base:
        header["base"] = {path: spell(array) for path, array in base.items()}
    text = json.dumps({"custom_metadata": header}).encode()  # as in Orbax's file
    problem = f"It has {len(text):,} bytes; at most {MAX_BYTES // 2:,} are read."
    if len(text) <= MAX_BYTES // 2:  # the other half is for the entries of Orbax
        problem = ""
        try:
            parse_object(text, METADATA)
        except ValueError as error:
            problem = str(error)
    if problem:
        raise CheckpointError(
            f"Cannot save the metadata, because it could not be read back. {problem} "
            "Save fewer arrays, or less metadata (such as the state of the data's "
            "iterator)."
        )
    # The digest protects the header: Orbax does not notice a flipped bit in JSON.
    return header | {"digest": digest(header)}


def check_checksums(stored: StoredCheckpoint, read: Groups, where: str) -> None:
    """Raises ``CheckpointDamagedError`` if an array's checksum is not the saved one."""
    # Orbax does not check values: it restores a flipped bit without an error.
    found, saved = checksums(read), stored.checksums
    lines = [
        f"{name}: `{path}` has checksum {value:08x} instead of {saved[name][path]:08x}"
        for name, group in found.items()
        for path, value in group.items()
        if saved[name][path] != value
    ]
    if lines:
        raise CheckpointDamagedError(
            f"{where} is damaged: {len(lines)} arrays differ from the saved "
            "values.\n  " + "\n  ".join(lines)
        )


def check_header(
    header: dict[str, Any] | None, step: int, where: str
) -> dict[str, Any]:
    """Returns the header of a step, if it is the header that was saved.

    ``where`` says where the header was found, for messages.

    Raises:
        CheckpointFormatError: If another program or version has written it.
        ValueError: If it is damaged.
    """
    if header is None or is_foreign(header):
        raise CheckpointFormatError(
            f"{where} was not written by this library: it has no header. Move it to "
            "another directory; nothing here deletes or renames it."
        )
    found = header.get("format")
    # This check comes first: another version may compute the digest in another way.
    if isinstance(found, int) and found != _FORMAT:
        raise CheckpointFormatError(
            f"{where} has format {found}; this version of nnx_parallel reads format "
            f"{_FORMAT}. This is not damage: install the version that wrote it, or "
            f"{'a later' if found > _FORMAT else 'an earlier'} one that reads it."
        )
    if header.get("digest") != digest(header) or not matches(header, _HEADER):
        raise ValueError("Its header differs from the saved one.")
    # The entry is absent in checkpoints of the first release.
    if (saved_as := header.get("step", step)) != step:
        raise ValueError(
            f"It was saved as step {saved_as}: its directory was renamed or copied."
        )
    for name in header["sizes"]:
        # The name becomes a path: `../../outside` must not leave the directory.
        if not name.isidentifier():
            raise ValueError(
                f"A group is named {name!r}, which is not a Python identifier."
            )
    return header


def read_stored(
    step: int, header: dict[str, Any], found: dict[str, Any], checksums: Checksums
) -> StoredCheckpoint:
    """Joins a header and Orbax's metadata of the header's groups.

    Raises ``ValueError`` if they do not belong together.
    """
    groups = {}
    for name, size in header["sizes"].items():
        arrays, keys = found.get(name) or {}, header["keys"][name]
        if len(arrays) != size:
            raise ValueError(
                f"Group {name!r} has {len(arrays)} arrays; {size} were saved."
            )
        groups[name] = {
            path: stored_array(array.shape, array.dtype, keys.get(path))
            for path, array in arrays.items()
        }
        for path, array in arrays.items():
            _check_chunks(path, array)
        # These shapes and dtypes come from Orbax's metadata, which the digest of our
        # header does not cover.
        for path, saved in header["arrays"][name].items():
            found_here = spell(groups[name][path]) if path in arrays else "nothing"
            if found_here != saved:
                raise ValueError(
                    f"`{path}` of group {name!r} was saved as {saved}; its files hold "
                    f"{found_here}."
                )
        if checksums.get(name, {}).keys() != arrays.keys():
            raise ValueError("Its checksums belong to other arrays.")
    # ``base`` is absent if every array was saved.
    values = {name: header.get(name, {}) for name in ("meta", "metrics", "base")}
    if checksums.get("base", {}).keys() != values["base"].keys():
        raise ValueError("Its checksums belong to another base.")
    return StoredCheckpoint(step=step, groups=groups, checksums=checksums, **values)


def _check_chunks(path: str, array: Any) -> None:
    """Raises ``ValueError`` if a chunk is larger than its array.

    Orbax reads an entire chunk: a chunk that exceeds the memory ends the process.
    """
    storage = array.storage_metadata
    inner, outer = storage.chunk_shape, getattr(storage, "zarr_metadata", None)
    for chunk in (inner, outer and outer.chunk_shape):
        pairs = zip(chunk or array.shape, array.shape, strict=True)
        if any(size > max(dim, 1) for size, dim in pairs):
            raise ValueError(
                f"`{path}` of shape {array.shape} is stored in chunks of {chunk}."
            )


def check_match(stored: StoredCheckpoint, wanted: AbstractGroups, where: str) -> None:
    """Compares requested arrays with a checkpoint's arrays.

    Without this check, Orbax silently restores the saved layout or casts to another
    dtype. If shapes differ, Orbax does not name the arrays.

    Raises:
        CheckpointError: If a requested array has no sharding.
        CheckpointMismatchError: If arrays differ in path, shape or dtype.
    """
    for name, group in wanted.items():
        for path, array in group.items():
            if getattr(array, "sharding", None) is None:
                raise CheckpointError(
                    f"Cannot restore `{path}` of group {name!r}: it has no sharding. "
                    "Give every array a jax.ShapeDtypeStruct with sharding=...; "
                    "without one it would take the sharding that it was saved with."
                )
    lines = [
        f"{name}: {line}"
        for name, group in wanted.items()
        for line in group_differences(stored.groups.get(name), group)
    ]
    if lines:
        # If only the optimizer differs, the model's arrays can be used as they are.
        is_model = any(line.startswith("model: ") for line in lines)
        weights = (
            ""
            if is_model or "model" not in stored.groups
            else (", or restore only the weights: trainer.restore(weights_only=True)")
        )
        raise CheckpointMismatchError(
            f"{where} differs from the requested arrays:\n  "
            + "\n  ".join(lines)
            + _on_eight_bits(stored.groups, wanted)
            + "\nBuild the same model and optimizer"
            f"{weights}. Saved groups: {list(stored.groups)}."
        )


def _on_eight_bits(stored: AbstractGroups, wanted: AbstractGroups) -> str:
    """Says which side keeps the optimizer's moments in 8 bits, if only one does."""
    had, has = (
        {"inner", "scales"} <= {x for p in group for x in p.split(".")}
        for group in (groups.get("optimizer", {}) for groups in (stored, wanted))
    )
    if had == has:
        return ""
    one = "the checkpoint" if had else "this Trainer"
    return (
        f"\nOnly {one} keeps the optimizer's moments in 8 bits (eight_bit_state). They "
        "cannot be restored from, or into, moments of another dtype."
    )


def _with_products(products: str | None) -> str:
    return f"with 8-bit products {products}" if products else "without 8-bit products"


def check_states(
    stored: StoredCheckpoint, description: Mapping[str, Any], where: str
) -> None:
    """Checks that a checkpoint has the same players, 8-bit products and states.

    Two optimizers may have arrays with the same paths and shapes but different
    meanings. Checkpoints of earlier versions do not name the kinds, so their kinds are
    not compared.

    Raises:
        CheckpointMismatchError: If players, products or kinds of states differ. The
            message has one line for each state.
    """
    players, saved = ({*x.get("players", ())} for x in (description, stored.meta))
    if players != saved:
        had, have = (
            f"the players {sorted(x)}" if x else "one loss, without players"
            for x in (saved, players)
        )
        raise CheckpointMismatchError(
            f"{where} was saved with {had}, and this Trainer has {have}. Build the "
            "same players, or take only the weights: "
            "trainer.restore(weights_only=True)."
        )
    had, has = (x.get("products") for x in (stored.meta, description))
    if had != has:
        raise CheckpointMismatchError(
            f"{where} was saved {_with_products(had)}, and this Trainer computes "
            f"{_with_products(has)}. The losses would not continue the losses of the "
            "saved run. Pass the Precision of that run, or take only the weights: "
            "trainer.restore(weights_only=True)."
        )
    here = description.get("optimizer_states", {})
    there = stored.meta.get("optimizer_states", {})
    lines = [
        f"optimizer: `{path}` is a {there[path]} in the checkpoint and a {kind} here"
        for path, kind in here.items()
        if there.get(path, kind) != kind
    ]
    if lines:
        raise CheckpointMismatchError(
            f"{where} was saved with another optimizer, and its states have another "
            "meaning:\n  "
            + "\n  ".join(lines)
            + "\nBuild the optimizer that saved it, or take only the weights: "
            "trainer.restore(weights_only=True)."
        )


def group_differences(
    stored: Mapping[str, jax.ShapeDtypeStruct] | None,
    wanted: Mapping[str, jax.ShapeDtypeStruct | jax.Array],
) -> Iterator[str]:
    """Yields a line for each array that differs in shape or dtype, or is missing.

    If more than five arrays have the same difference, only three are named.
    """
    if stored is None:
        yield "the checkpoint has no such group"
        return
    there, here = (
        {p: spell(x) for p, x in group.items()} for group in (stored, wanted)
    )
    # A path that both sides have is not a misspelling of a missing path, so it is not
    # among the candidates for the nearest name.
    missing, extra = (
        [p for p in x if p not in y] for x, y in [(here, there), (there, here)]
    )
    changed = [p for p, x in here.items() if there.get(p, x) != x]
    yield from _name_some(
        changed,
        lambda p: f"`{p}` is {there[p]} in the checkpoint and {here[p]} here",
        "have another shape or dtype",
    )
    yield from _name_some(
        missing,
        lambda p: (
            f"`{p}` {here[p]} is not in the checkpoint{_nearest(p, 'there', extra)}"
        ),
        "are not in the checkpoint",
    )
    yield from _name_some(
        extra,
        lambda p: (
            f"`{p}` {there[p]} is only in the checkpoint{_nearest(p, 'here', missing)}"
        ),
        "are only in the checkpoint",
    )


def _name_some(
    paths: Sequence[str], describe: Callable[[str], str], rest: str
) -> Iterator[str]:
    """Yields a line for each path; for more than five paths, three and a count."""
    shown = paths if len(paths) <= 5 else paths[:3]
    yield from map(describe, shown)
    if len(shown) < len(paths):
        yield f"... and {len(paths) - len(shown)} more arrays {rest}"


def _nearest(path: str, where: str, others: Iterable[str]) -> str:
    close = difflib.get_close_matches(path, sorted(others), n=1)
    return f" (nearest {where}: `{close[0]}`)" if close else ""


def spell(array: jax.ShapeDtypeStruct | jax.Array) -> str:
    """Returns dtype and shape in one word, such as ``float32[4,8]``."""
    return f"{array.dtype}[{','.join(map(str, array.shape))}]"


def stored_array(
    shape: Sequence[int], dtype: Any, key_impl: str | None
) -> jax.ShapeDtypeStruct:
    """Returns an array by the shape and dtype of its stored words."""
    shape = tuple(shape)
    if key_impl is None:
        return jax.ShapeDtypeStruct(shape, dtype)
    # The shape of a key's words is (..., words).
    key = jax.eval_shape(lambda: jax.random.key(0, impl=key_impl))
    return jax.ShapeDtypeStruct(shape[:-1], key.dtype)


def split_base(
    groups: Mapping[str, Mapping[str, T]], paths: Collection[str]
) -> tuple[dict[str, dict[str, T]], dict[str, T]]:
    """Returns the groups without the model's arrays at ``paths``, and these arrays."""
    model = groups.get("model", {})
    base = {path: x for path, x in model.items() if path in paths}
    rest = {name: dict(group) for name, group in groups.items()}
    if base:
        rest["model"] = {path: x for path, x in model.items() if path not in base}
    return rest, base


def with_base(
    groups: Groups, base: Mapping[str, jax.Array] | None
) -> dict[str, Mapping[str, jax.Array]]:
    """Returns the arrays to hash: the groups, and the base if there is one."""
    return {**groups, **({BASE: base} if base else {})}


def check_base_shapes(
    stored: StoredCheckpoint, wanted: Mapping[str, Any], where: str
) -> None:
    """Raises ``CheckpointMismatchError`` if the base has other shapes or dtypes."""

    def differences() -> Iterator[str]:
        for path, saved in stored.base.items():
            found = spell(wanted[path]) if path in wanted else "nothing"
            if found != saved:
                yield f"`{path}` was {saved} and is {found} here"

    if lines := list(differences()):
        raise CheckpointMismatchError(
            f"{where} was trained on another base:\n  " + "\n  ".join(lines)
        )


def same_base(
    stored: StoredCheckpoint, paths: Collection[str], base: Base | None, where: str
) -> dict[str, jax.Array]:
    """Returns the run's base, if it is the base that the checkpoint names.

    Raises:
        CheckpointMismatchError: If an array differs, or if the run has no base.
    """
    if base is None:
        raise CheckpointMismatchError(
            f"{where} names {len(paths)} arrays by checksum and does not hold their "
            "values: restore it into a Trainer whose model has the same base."
        )
    given = base()
    own = {path: given[path] for path in paths}
    found, saved = checksums({BASE: own})[BASE], stored.checksums[BASE]
    if differing := [path for path in own if found[path] != saved[path]]:
        first = differing[0]
        raise CheckpointMismatchError(
            f"{where} was trained on another base: {len(differing)} of {len(own)} "
            "arrays that it names by checksum differ from this model's arrays. The "
            f"first, `{first}`, has checksum {found[first]:08x}; it was "
            f"{saved[first]:08x}. Build the model from the weights that the run began "
            "with."
        )
    return own
