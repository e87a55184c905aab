from __future__ import annotations

import pytest

from tests.bench.finished import FRACTIONS, Finished, suite


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return suite(tmp_path_factory.mktemp("suite"), "--tokens", "1", "--budgets", ",".join(map(str, FRACTIONS)))
