"""The native observer for tests: built once into a cache of the checkout's own, never the user's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

CACHE = Path(
    os.environ.get("GRADTRACE_TEST_CACHE") or Path(__file__).resolve().parents[3] / ".native-cache"
)
# A folder that is never made: what a user has built changes no test.
NOWHERE = CACHE / "none"


def build() -> Path:
    """Build it, or find it built, and let this process and its children use it. Raises NotBuilt."""
    from gradtrace_recorder.observers.native.build import CACHE_VARIABLE, build_native

    before = os.environ.get(CACHE_VARIABLE)
    os.environ[CACHE_VARIABLE] = str(CACHE)
    try:
        return build_native()
    except BaseException:
        if before is not None:
            os.environ[CACHE_VARIABLE] = before
        raise


def build_or_skip() -> Path:
    """The same for a test, which is skipped where nothing compiles."""
    from gradtrace_recorder.observers.native.build import NotBuilt

    try:
        return build()
    except NotBuilt as error:
        pytest.skip(str(error))
