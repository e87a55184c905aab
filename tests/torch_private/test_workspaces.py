from __future__ import annotations

import pytest
import torch

from penstock.torch_private import workspaces


def test_workspaces_that_graphs_may_address_are_not_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: called.append("clear"), raising=False)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: called.append("empty"))
    monkeypatch.setattr(workspaces, "_addressed", False)
    workspaces.release_device_memory()
    assert called == ["clear", "empty"]
    workspaces.keep_workspaces()
    workspaces.release_device_memory()
    assert called == ["clear", "empty", "empty"]
