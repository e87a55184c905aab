from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.report.browser import MISSING, Browser, Page, find_browser

# The programs that the tests of the runtime compile, once for all of them.
from tests.runtime.conftest import decoder, program_path

__all__ = ["decoder", "program_path"]


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = find_browser()
    if program is None:
        pytest.skip(MISSING)
    opened = Browser(program, tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Callable[..., Page]]:
    pages: list[Page] = []

    def opened(path: Path, *, width: int = 1400, dark: bool = False) -> Page:
        pages.append(Page(browser, path, width=width, dark=dark))
        return pages[-1]

    yield opened
    for page in pages:
        page.close()
