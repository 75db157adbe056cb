"""What piecework exports is documented."""

from __future__ import annotations

import inspect

import pytest

import piecework


def public_objects() -> list[object]:
    named = [getattr(piecework, name) for name in piecework.__all__]
    documented = [thing for thing in named if inspect.isclass(thing) or inspect.isfunction(thing)]
    methods = [
        member
        for thing in documented
        if inspect.isclass(thing)
        for name, member in vars(thing).items()
        if not name.startswith("_") and inspect.isfunction(member)
    ]
    return [*documented, *methods]


@pytest.mark.parametrize("thing", public_objects(), ids=lambda thing: thing.__qualname__)
def test_public_name_has_a_docstring_that_ends_its_first_line(thing: object) -> None:
    first = (inspect.getdoc(thing) or "").partition("\n\n")[0].strip()
    assert first, "no docstring"
    assert first[-1] in ".:", first
