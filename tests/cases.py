"""Cases of one test that are too quick for a test each: pytest takes ten milliseconds and more for every test."""

import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

__all__ = ["in_one_test"]


def in_one_test(
    names: str | tuple[str, ...], cases: Iterable[Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Like ``pytest.mark.parametrize``, but all cases are one test, which ends with the first that fails and names it.

    For cases without marks, of tests whose other fixtures do not change from case to case.
    """
    keys = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    rows = [case if len(keys) > 1 else (case,) for case in cases]

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @wraps(test)
        def all_cases(**given: Any) -> None:
            for row in rows:
                case = dict(zip(keys, row, strict=True))
                try:
                    test(**given, **case)
                except BaseException as error:
                    error.add_note(f"case: {case}")
                    raise

        signature = inspect.signature(test)
        others = [parameter for name, parameter in signature.parameters.items() if name not in keys]
        all_cases.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        return all_cases

    return decorate
