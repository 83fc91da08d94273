"""Jobs of tests that are still to come, begun ahead: two at a time, so that no core idles while one job starts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Generic, TypeVar

import pytest

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class Ahead(Generic[K, T]):
    """Results of jobs by key; what a job raised is raised where its result is asked for.

    Those in `alone` come first, one at a time, while nothing else runs: their times are looked at.
    """

    def __init__(self, jobs: Mapping[K, Callable[[], T]], alone: Collection[K] = ()) -> None:
        self._pool = ThreadPoolExecutor(2)
        self._results: dict[K, Future[T]] = {}
        for key in alone:
            self._results[key] = self._pool.submit(jobs[key])
            wait([self._results[key]])
        for key in jobs:
            if key not in alone:
                self._results[key] = self._pool.submit(jobs[key])

    def __getitem__(self, key: K) -> T:
        return self._results[key].result()

    def close(self) -> None:
        """Begin no more; wait for those that run."""
        self._pool.shutdown(cancel_futures=True)


def chosen_items(request: pytest.FixtureRequest) -> Iterator[pytest.Item]:
    """The tests of the fixture's module that will run, in their order."""
    items: Iterable[pytest.Item] = request.session.items
    return (item for item in items if item.path == request.node.path)


def parameters_of(item: pytest.Item) -> Mapping[str, object]:
    """What a test is parametrized with."""
    callspec = getattr(item, "callspec", None)
    return callspec.params if callspec is not None else {}
