"""Every error of the library links to its entry on the site."""

import traceback
from collections.abc import Iterator
from email.message import Message

import pytest

from nnx_parallel import errors

SITE = "https://example.org/nnx-parallel/"


@pytest.fixture(autouse=True)
def _asked_again() -> Iterator[None]:
    errors._site.cache_clear()  # pyright: ignore[reportPrivateUsage]
    yield
    errors._site.cache_clear()  # pyright: ignore[reportPrivateUsage]


def name_sites(monkeypatch: pytest.MonkeyPatch, *urls: str) -> None:
    """Gives the package's metadata these project addresses."""
    found = Message()
    for url in urls:
        found["Project-URL"] = url
    monkeypatch.setattr(errors, "metadata", lambda name: found)


CLASSES = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, errors.ParallelError)
]


@pytest.mark.parametrize("kind", CLASSES)
def test_traceback_ends_with_documentation_link(
    monkeypatch: pytest.MonkeyPatch, kind: type[errors.ParallelError]
) -> None:
    repository = "Repository, https://example.org/code"
    name_sites(monkeypatch, repository, f"Documentation, {SITE}")
    error = kind("found, rule, valid values")
    assert str(error).strip("'") == "found, rule, valid values"
    *_, last = "".join(traceback.format_exception(error)).splitlines()
    assert last == f"More: {SITE}errors.html#nnx_parallel.errors.{kind.__name__}"


@pytest.mark.parametrize("urls", [(), ("Repository, https://example.org/code",)])
def test_error_without_site_has_no_link(
    monkeypatch: pytest.MonkeyPatch, urls: tuple[str, ...]
) -> None:
    name_sites(monkeypatch, *urls)
    assert not hasattr(errors.MeshShapeError("found"), "__notes__")
