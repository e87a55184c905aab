from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of this folder is `make test-models`."""
    for item in items:
        if Path(item.path).parent == Path(__file__).parent:
            item.add_marker(pytest.mark.models)


@pytest.fixture(autouse=True)
def quiet_transformers() -> Iterator[None]:
    """Its own notes on configurations and progress say nothing about a test."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
        yield
    logging.set_verbosity(verbosity)
    logging.enable_progress_bar()
