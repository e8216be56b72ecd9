"""Map a function over many items in threads, in order, and stop at the first error."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def map_in_threads(
    work: Callable[[_Item], _Result], items: Iterable[_Item], workers: int, name: str
) -> Iterator[_Result]:
    """Yield ``work(item)`` for each item, in order, computed by ``workers`` threads called ``name``.

    What ``work`` raises is raised here, and items that have not begun are dropped.
    """
    with ThreadPoolExecutor(max_workers=workers, thread_name_prefix=name) as pool:
        try:
            yield from pool.map(work, items)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
