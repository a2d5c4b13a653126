"""Part of tyro: the defaults of a dataclass, without a command line."""

from typing import TypeVar

T = TypeVar("T")


def cli(cls: type[T]) -> T:
    return cls()
