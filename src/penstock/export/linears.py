"""Finds the reads of a weight that only multiply by its rows. Those become penstock_linear, for which the rows may lie
in two places."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from penstock.ops import LINEAR
from penstock.torch_private.graph import arguments

_DTYPES = (torch.bfloat16, torch.float16)
# Rows are read in pieces of 16 bytes.
_DEPTH_GRAIN = 8


@dataclass(frozen=True)
class _Product:
    """One reader: x times the weight transposed, plus bias."""

    reader: Node
    x: Node
    bias: Node | None


def rewrite_linears(graph: Graph, weight: Node, access: int) -> bool:
    """Replace every reader of a lent weight with penstock_linear, if all can be replaced; says whether they were.

    A single reader that cannot be replaced rules out all: it would read rows that do not lie where its weight begins.
    """
    if not _suits(weight.meta["val"]):
        return False
    products: list[_Product] = []
    transposes: list[Node] = []
    for user in weight.users:
        if _is_transpose(user):
            transposes.append(user)
            found = [_product_of(reader, user, transposed=True) for reader in user.users]
        else:
            found = [_product_of(user, weight, transposed=False)]
        if not all(product is not None and _fits(product, weight) for product in found):
            return False
        products.extend(product for product in found if product is not None)
    if not products:
        return False
    for product in products:
        _rewrite(graph, product, weight, access)
    for transpose in transposes:
        graph.erase_node(transpose)
    return True


def _suits(value: torch.Tensor) -> bool:
    if value.dim() != 2 or value.dtype not in _DTYPES:
        return False
    rows, depth = value.shape
    return rows > 0 and depth > 0 and depth % _DEPTH_GRAIN == 0


def _is_transpose(node: Node) -> bool:
    given = arguments(node)
    if node.target is torch.ops.aten.permute.default:
        return [dim % 2 for dim in given["dims"]] == [1, 0]
    if node.target is torch.ops.aten.transpose.int:
        return bool(given["dim0"] % 2 != given["dim1"] % 2)
    return node.target is torch.ops.aten.t.default


def _product_of(reader: Node, weight: Node, *, transposed: bool) -> _Product | None:
    """The reader as a product with `weight` (the lent one, or its transpose); None if it is something else."""
    given = arguments(reader)
    x: Any
    bias: Any = None
    if not transposed and reader.target is torch.ops.aten.linear.default:
        x, bias = given["input"], given["bias"]
    elif transposed and reader.target in (torch.ops.aten.mm.default, torch.ops.aten.matmul.default):
        x = given["self"]
    elif transposed and reader.target is torch.ops.aten.addmm.default and given["alpha"] == given["beta"] == 1:
        bias, x = given["self"], given["mat1"]
    else:
        return None
    # The lent weight may only be the weight operand: one that is multiplied with itself is also read as a whole.
    return None if weight in (x, bias) else _Product(reader, x, bias)


def _fits(product: _Product, weight: Node) -> bool:
    lent, x = weight.meta["val"], product.x.meta["val"]
    if x.dtype != lent.dtype:
        return False
    if product.bias is None:
        return True
    bias = product.bias.meta["val"]
    # One number for each row of the weight; addmm takes other shapes, too.
    return bias.dtype == lent.dtype and bias.dim() == 1 and bool(bias.shape[0] == lent.shape[0])


def _rewrite(graph: Graph, product: _Product, weight: Node, access: int) -> None:
    reader, x, value = product.reader, product.x, product.x.meta["val"]
    rows, depth = weight.meta["val"].shape
    with graph.inserting_before(reader):
        if value.dim() != 2:
            tokens = math.prod(value.shape[:-1])
            x = graph.call_function(torch.ops.aten.reshape.default, (x, [-1, depth]))
            x.meta["val"] = value.new_empty((tokens, depth))
        result = graph.call_function(LINEAR, (x, weight, product.bias, access))
        result.meta["val"] = value.new_empty((x.meta["val"].shape[0], rows))
        if value.dim() != 2:
            sizes = [_size(graph, product.x, dim) for dim in range(value.dim() - 1)]
            result = graph.call_function(torch.ops.aten.reshape.default, (result, [*sizes, rows]))
            result.meta["val"] = reader.meta["val"]
    reader.replace_all_uses_with(result)
    graph.erase_node(reader)


def _size(graph: Graph, tensor: Node, dim: int) -> int | Node:
    size = tensor.meta["val"].shape[dim]
    if isinstance(size, int):
        return size
    node = graph.call_function(torch.ops.aten.sym_size.int, (tensor, dim))
    node.meta["val"] = size
    return node
