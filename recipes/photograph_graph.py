"""Crop and resize of an image of any size to the network's input, as nodes in front of an ONNX graph.

Tested in `tests/recipes/test_export.py`.
"""

from typing import Any

import numpy as np

INPUT = "image"
DESCRIPTION = "uint8 of shape (1, height, width, 3): one upright RGB image of any size, pixels from 0 to 255"

_CROPPED = "images"
"""The input of the network's graph, which becomes an inner value: uint8 of shape (1, 3, size, size)."""


def add_photograph_input(model: Any, size: int, kept: float) -> None:
    """Extend an ONNX model for images of one size so that its input is one image of any size.

    The graph computes `datamodules.images.decoding.evaluation_square`: it cuts the central square at whole pixels,
    resizes it in float32 with antialiased, bilinear interpolation, and rounds to even. Without ``exclude_outside``, the
    pixels at the borders would be darker.

    Args:
        model: an `onnx.ModelProto` of opset 18 or later with the input ``images``, uint8 of shape (batch, 3, size,
            size). Its input is then `INPUT`, uint8 of shape (1, height, width, 3).
        size: side of the network's inputs, in pixels.
        kept: share of the short side that the square keeps.
    """
    from onnx import TensorProto, helper, numpy_helper

    constants: dict[str, Any] = {
        "kept": np.array([kept], np.float64),
        "least_side": np.array([1], np.int64),
        "two": np.array([2], np.int64),
        "height_and_width": np.array([2, 3], np.int64),
        "size": np.array([1, 3, size, size], np.int64),
        "black": np.array(0, np.float32),
        "white": np.array(255, np.float32),
    }
    resize = {"mode": "linear", "antialias": 1, "exclude_outside": 1, "coordinate_transformation_mode": "half_pixel"}
    steps: list[tuple[str, list[str], str, dict[str, Any]]] = [
        ("Transpose", [INPUT], "channels_first", {"perm": [0, 3, 1, 2]}),
        ("Shape", ["channels_first"], "sides", {"start": 2}),
        ("ReduceMin", ["sides"], "short_side", {"keepdims": 1}),
        # In float64 as in Python: another rounding could select another pixel.
        ("Cast", ["short_side"], "short_side_float", {"to": TensorProto.DOUBLE}),
        ("Mul", ["short_side_float", "kept"], "side_float", {}),
        ("Round", ["side_float"], "side_rounded", {}),
        ("Cast", ["side_rounded"], "side_integer", {"to": TensorProto.INT64}),
        ("Max", ["side_integer", "least_side"], "side", {}),
        ("Sub", ["sides", "side"], "margins", {}),
        ("Div", ["margins", "two"], "start", {}),
        ("Add", ["start", "side"], "stop", {}),
        ("Slice", ["channels_first", "start", "stop", "height_and_width"], "square", {}),
        ("Cast", ["square"], "square_float", {"to": TensorProto.FLOAT}),
        ("Resize", ["square_float", "", "", "size"], "resized", resize),
        ("Round", ["resized"], "rounded", {}),
        ("Clip", ["rounded", "black", "white"], "clipped", {}),
        ("Cast", ["clipped"], _CROPPED, {"to": TensorProto.UINT8}),
    ]

    def named(value: str) -> str:
        return value if value in ("", INPUT, _CROPPED) else f"photograph/{value}"

    nodes = []
    for kind, inputs, output, attributes in steps:
        nodes.append(helper.make_node(kind, [*map(named, inputs)], [named(output)], named(output), **attributes))
    graph = model.graph
    nodes += graph.node
    del graph.node[:]
    graph.node.extend(nodes)
    graph.initializer.extend(numpy_helper.from_array(array, named(name)) for name, array in constants.items())
    shape: list[str | int | None] = [1, "height", "width", 3]
    del graph.input[:]
    graph.input.append(helper.make_tensor_value_info(INPUT, TensorProto.UINT8, shape, DESCRIPTION))
