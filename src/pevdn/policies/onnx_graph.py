"""One step of acting as an ONNX graph: the networks of `pevdn.agent` in ONNX operators.

Parameters keep their names. Shapes: B batch, O observation, A actions, H hidden, M memory, n
entities of a group.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import pevdn
from pevdn.agent import acting, entities, recurrent
from pevdn.policies.export import arrays

OPSET, IR_VERSION = 13, 7  # from 2020: old runtimes can read it


def to_onnx(params: recurrent.Parameters | entities.Parameters, facts: dict[str, str]) -> bytes:
    """Return a serialised, checked model with the facts as its properties.

    Inputs: observation (B, O) float, available (B, A) bool, memory (B, M) float, last_action (B,)
    int64. Outputs: action (B,) int64, q_values (B, A) float, next_memory (B, M) float. At the start
    of an episode memory is 0 and last_action is −1.
    """
    graph = _Graph()
    if isinstance(params, entities.Parameters):
        _entities(graph, params)
    else:
        _recurrent(graph, params)
    unavailable = graph.constant(np.float32(acting.UNAVAILABLE))
    masked = graph("Where", "available", "q_values", unavailable)
    graph("ArgMax", masked, axis=1, keepdims=0, out="action")

    O, A, M = (int(facts[name]) for name in ("observation_size", "n_actions", "memory_size"))
    shape = helper.make_tensor_value_info
    model = helper.make_model(
        helper.make_graph(
            graph.nodes,
            "policy",
            [
                shape("observation", TensorProto.FLOAT, ["batch", O]),
                shape("available", TensorProto.BOOL, ["batch", A]),
                shape("memory", TensorProto.FLOAT, ["batch", M]),
                shape("last_action", TensorProto.INT64, ["batch"]),
            ],
            [
                shape("action", TensorProto.INT64, ["batch"]),
                shape("q_values", TensorProto.FLOAT, ["batch", A]),
                shape("next_memory", TensorProto.FLOAT, ["batch", M]),
            ],
            graph.constants,
        ),
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
        producer_name="pevdn",
        producer_version=pevdn.__version__,
    )
    helper.set_model_props(model, facts)
    onnx.checker.check_model(model, full_check=True)
    return bytes(model.SerializeToString())


class _Graph:
    """The nodes in execution order; a value is represented by its name."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []

    def __call__(self, op: str, *inputs: str, out: str = "", **attributes: Any) -> str:
        out = out or f"{op}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [out], **attributes))
        return out

    def constant(self, value: Any, name: str = "") -> str:
        name = name or f"constant_{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def linear(self, x: str, weight: str, bias: str, out: str = "") -> str:
        return self("Add", self("MatMul", x, weight), bias, out=out)

    def thirds(self, x: str) -> list[str]:
        names = [f"Split_{len(self.nodes)}_{n}" for n in range(3)]
        self.nodes.append(helper.make_node("Split", [x], names, axis=-1))
        return names


def _recurrent(graph: _Graph, params: recurrent.Parameters) -> None:
    """Add the nodes of `recurrent.step`."""
    for name, array in arrays(params).items():
        graph.constant(array, name)
    last = graph("Unsqueeze", "last_action", graph.constant([1]))
    is_last = graph("Equal", last, graph.constant(np.arange(len(params.output_bias))))
    one_hot = graph("Cast", is_last, to=TensorProto.FLOAT)
    inputs = graph("Concat", "observation", one_hot, axis=1)
    features = graph("Relu", graph.linear(inputs, "input_weight", "input_bias"))
    gates = graph.thirds(graph.linear(features, "gates_weight", "gates_bias"))
    remembered = graph.thirds(graph("MatMul", "memory", "recurrent_weight"))
    reset = graph("Sigmoid", graph("Add", gates[0], remembered[0]))
    update = graph("Sigmoid", graph("Add", gates[1], remembered[1]))
    recalled = graph("Mul", reset, graph("Add", remembered[2], "candidate_bias"))
    candidate = graph("Tanh", graph("Add", gates[2], recalled))
    kept = graph("Mul", update, graph("Sub", "memory", candidate))
    memory = graph("Add", candidate, kept, out="next_memory")
    graph.linear(memory, "output_weight", "output_bias", out="q_values")


def _entities(graph: _Graph, params: entities.Parameters) -> None:
    """Add the nodes of `entities.step`.

    `own.weight` has a row for every number of an observation, zero for those of entities, so that
    no product is empty. Groups without entities are left out.
    """
    spec, named = params.spec, arrays(params)

    def linear(x: str, layer: str) -> str:
        weight, bias = (f"{layer}.{part}" for part in ("weight", "bias"))
        return graph.linear(
            x, graph.constant(named[weight], weight), graph.constant(named[bias], bias)
        )

    rest = np.ones(spec.observation_size, bool)
    for group in spec.entities:
        rest[group.start : group.start + group.count * group.size] = False
    own_weight = np.zeros((spec.observation_size, len(params.core.bias)), np.float32)
    own_weight[rest] = named["own.weight"]
    named["own.weight"] = own_weight

    parts, embedded = [graph("Relu", linear("observation", "own"))], {}
    of_parts = np.split(named["core.weight"], 1 + len(spec.entities))
    rows = of_parts[:1]
    for g, group in enumerate(spec.entities):
        if not group.count:
            continue
        ends = group.start, group.start + group.count * group.size
        cut = graph("Slice", "observation", *(graph.constant([end]) for end in (*ends, 1)))
        each = graph("Reshape", cut, graph.constant([0, group.count, group.size]))  # 0: unchanged
        largest = graph("ReduceMax", graph("Abs", each), axes=[2], keepdims=1)
        zero = graph.constant(np.float32(0))
        visible = graph("Cast", graph("Greater", largest, zero), to=TensorProto.FLOAT)
        embedded[g] = graph("Mul", graph("Relu", linear(each, f"encoders.{g}")), visible)
        parts.append(graph("ReduceSum", embedded[g], graph.constant([1]), keepdims=0))
        rows.append(of_parts[1 + g])
    named["core.weight"] = np.concatenate(rows)
    core = graph("Relu", linear(graph("Concat", *parts, axis=1), "core"))

    values: list[str] = []
    order: list[int] = []  # the action of each value
    targets = [g for g, group in enumerate(spec.entities) if group.actions is not None]
    for s, g in enumerate(targets):
        if g not in embedded:
            continue
        weights = {
            name: graph.constant(named[f"scorers.{s}.{name}"], f"scorers.{s}.{name}")
            for name in ("core_weight", "thing_weight", "bias")
        }
        from_core = graph.linear(core, weights["core_weight"], weights["bias"])
        from_entity = graph("MatMul", embedded[g], weights["thing_weight"])
        both = graph("Add", graph("Unsqueeze", from_core, graph.constant([1])), from_entity)
        scores = linear(graph("Relu", both), f"scorers.{s}.output")  # (B, n, 1)
        values.append(graph("Squeeze", scores, graph.constant([2])))
        first = spec.entities[g].actions or 0
        order += range(first, first + spec.entities[g].count)
    if plain := [action for action in range(spec.n_actions) if action not in order]:
        values.append(linear(core, "plain"))
        order += plain
    together = graph("Concat", *values, axis=1)
    graph("Gather", together, graph.constant(np.argsort(order)), axis=1, out="q_values")
    graph("Identity", "memory", out="next_memory")
