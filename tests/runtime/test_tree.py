"""The module tree: paths, and noticing that modules changed."""

from __future__ import annotations

import torch

from nnsight.runtime.modules.tree import ModuleTree


def test_it_notices_changes_once() -> None:
    root = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Sequential())
    tree = ModuleTree(root)
    instrumentation = tree.instrumentation
    version = tree.refresh()
    assert tree.instrumentation is instrumentation
    assert tree.refresh() == version
    for change in (
        lambda: root[1].append(torch.nn.ReLU()),
        lambda: setattr(root, "0", torch.nn.Linear(1, 1)),
        lambda: root.register_module("extra", torch.nn.ReLU()),
        lambda: root[1][0].register_module("deep", torch.nn.ReLU()),
        lambda: root.__delitem__(0),
    ):
        change()
        assert tree.refresh() == version + 1
        version = tree.refresh()
        assert version == tree.version
        assert set(tree.paths) == set(root.modules())
    assert tree.instrumentation is not instrumentation


