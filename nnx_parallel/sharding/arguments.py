"""Arguments of a function: their names, and which placement belongs to which."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nnx_parallel.errors import PlacementTreeError
from nnx_parallel.sharding.arrays import suggest
from nnx_parallel.sharding.trees import is_placeable

_POSITIONAL = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
)


class Arguments:
    """The parameters of a function, and how its calls spell them.

    Attributes:
        signature: Its signature; ``(*args, **kwargs)`` for one that has none.
        static: Names of the static parameters.
    """

    def __init__(self, fn: Callable[..., Any], static: Sequence[str]) -> None:
        try:
            self.signature = inspect.signature(fn)
        except (TypeError, ValueError):
            self.signature = inspect.signature(lambda *args, **kwargs: None)
        self.static = tuple(static)
        parameters = self.signature.parameters.values()
        self._kinds = {parameter.kind for parameter in parameters}
        self._positional = [p.name for p in parameters if p.kind in _POSITIONAL]
        self._dynamic = [name for name in self._positional if name not in static]

    def check_names(self, names: Sequence[str], option: str) -> None:
        """Checks that names given to an option are parameters.

        Raises:
            ValueError: If one is not.
        """
        known = self.signature.parameters
        takes_any = inspect.Parameter.VAR_KEYWORD in self._kinds
        for name in () if takes_any else names:
            if name not in known:
                raise ValueError(
                    f"{option} names {name!r}, which the function does not take."
                    f"{suggest(name, known)} Its parameters: {list(known)}."
                )

    def check_placements(self, placements: Any, option: str) -> None:
        """Checks what can be checked before the first call.

        Raises:
            ValueError: If a mapping names no parameter.
            PlacementTreeError: If there are more entries than arguments, or it is
                nothing that places.
        """
        if isinstance(placements, Mapping):
            self.check_names(list(placements), option)
            static = [name for name in placements if name in self.static]
            if static:
                raise ValueError(
                    f"{option} places {static}, but static arguments are no arrays. "
                    f"Leave them out; dynamic are {self._dynamic}."
                )
        elif isinstance(placements, tuple | list):
            takes_any = inspect.Parameter.VAR_POSITIONAL in self._kinds
            if len(placements) > len(self._dynamic) and not takes_any:
                raise PlacementTreeError(
                    f"{option} has {len(placements)} entries for the arguments "
                    f"{self._dynamic}. Give one for each that is not static, in order, "
                    "or a mapping by name."
                )
        elif not is_placeable(placements):
            raise PlacementTreeError(
                f"{option} is a {type(placements).__name__}. Pass one rule, spec or "
                "sharding for all arguments, a tuple with one for each, or a mapping "
                "by name."
            )

    def names(self, num_positional: int, keywords: Sequence[str]) -> tuple[str, ...]:
        """The name of each value of a call, those given by keyword last.

        Raises:
            TypeError: If the function cannot be called like that.
        """
        self.signature.bind(*range(num_positional), **dict.fromkeys(keywords))
        extra = range(num_positional - len(self._positional))
        names = [*self._positional[:num_positional], *(f"args_{i}" for i in extra)]
        return (*names, *keywords)

    def placement_of(self, name: str, placements: Any, option: str) -> Any:
        """What an option says about one dynamic argument.

        Raises:
            PlacementTreeError: If a tuple has no entry for it.
        """
        if is_placeable(placements):
            return placements
        if isinstance(placements, Mapping):
            extra = self.signature.parameters.get(name) is None
            fallback = self._starred(name) if extra else None
            return placements.get(name, placements.get(fallback))
        index = self._index(name)
        if index is None:
            return None
        if index >= len(placements):
            raise PlacementTreeError(
                f"{option} has {len(placements)} entries, none for the argument "
                f"`{name}`. Give one for each of {self._dynamic}, in order, None to "
                "leave it to the compiler, or a mapping by name."
            )
        return placements[index]

    def _index(self, name: str) -> int | None:
        if name in self._dynamic:
            return self._dynamic.index(name)
        if name not in self.signature.parameters and name.startswith("args_"):
            return len(self._dynamic) + int(name.removeprefix("args_"))
        return None

    def _starred(self, name: str) -> str | None:
        """Name of the ``*args`` or ``**kwargs`` that an extra argument goes to."""
        kind = (
            inspect.Parameter.VAR_POSITIONAL
            if name.startswith("args_")
            else inspect.Parameter.VAR_KEYWORD
        )
        found = [p.name for p in self.signature.parameters.values() if p.kind is kind]
        return found[0] if found else None
