"""What the package uses of TensorRT exists in TensorRT for RTX. For full TensorRT: ``make test-bindings``."""

from __future__ import annotations

from functools import reduce
from typing import Any

import pytest

from tests.bindings.uses import find_uses
from trt_kvcache.trt.module import load


@pytest.mark.trt
def test_only_plugin_layers_are_missing_in_tensorrt_for_rtx() -> None:
    """They are parsed there: ``can_add_plugins``."""
    module = load("tensorrt_rtx").module

    def find(name: str) -> Any:
        return reduce(lambda found, part: getattr(found, part, None), name.split("."), module)

    assert sorted({use.name for use in find_uses() if find(use.name) is None}) == ["INetworkDefinition.add_plugin_v3"]


def test_runtimes_and_builders_are_made_where_the_driver_is_asked_first() -> None:
    """``TensorRT.create``: without a GPU, some libraries of full TensorRT return an invalid pointer."""
    assert [use.where for use in find_uses() if use.name in ("Runtime", "Builder")] == []
