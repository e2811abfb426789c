"""Products: linear layers, the matmul family, einsum, attention."""

from __future__ import annotations

from workbench.runtime.ops.registry import Call, Resolution, equations, rule

equations("linear", "...k, nk, +n -> ...n", parameters="input weight bias")
equations("mm", "mk, kn -> mn")
equations("bmm", "bmk, bkn -> bmn")
equations("mv", "mk, k -> m")
equations("dot vdot", "k, k ->")
equations("outer ger", "m, n -> mn")
equations("baddbmm", "+..., bmk, bkn -> bmn")


@rule("addmm")
def _addmm(call: Call) -> Resolution | None:
    if call.kwargs.get("beta", 1) != 1 or len(call.shapes[0]) > 2:
        return None
    bias = {2: "+mn", 1: "+n", 0: "+"}[len(call.shapes[0])]
    return Resolution(f"{bias}, mk, kn -> mn")


@rule("matmul", "rmatmul")
def _matmul(call: Call) -> Resolution:
    """torch.matmul's cases by number of dims; ``...`` are the batch dims, which broadcast."""
    left, right = (len(shape) for shape in call.shapes)
    if call.name == "rmatmul":
        left, right = right, left
    if left == 1 and right == 1:
        text = "k, k ->"
    elif left == 1:
        text = "k, ...kn -> ...n"
    elif right == 1:
        text = "...mk, k -> ...m"
    else:
        text = "...mk, ...kn -> ...mn"
    if call.name == "rmatmul":
        inputs, _, output = text.partition("->")
        first, second = inputs.split(",")
        text = f"{second}, {first} -> {output}"
    return Resolution(text)


@rule("einsum")
def _einsum(call: Call) -> Resolution | None:
    """An einsum's own equation, where no letter repeats inside an operand and all letters are small."""
    equation = call.args[0]
    if not isinstance(equation, str):
        return None
    left, arrow, right = equation.replace(" ", "").partition("->")
    parts = left.split(",")
    if "." in equation or not left.replace(",", "").islower() or any(len(set(part)) < len(part) for part in parts):
        return None
    if not arrow:
        letters = "".join(parts)
        right = "".join(sorted(letter for letter in set(letters) if letters.count(letter) == 1))
    return Resolution(f"{','.join(parts)} -> {right}")


@rule("scaled_dot_product_attention", parameters="query key value attn_mask dropout_p is_causal scale enable_gqa")
def _attention(call: Call) -> Resolution | None:
    """Batch and heads split freely; sequence and width stay whole. Grouped queries split only with their groups."""
    if call.arg(4, "dropout_p", 0.0) > 0:
        return None
    query, key = call.shapes[0], call.shapes[1]
    grouped = bool(call.arg(7, "enable_gqa", False)) and query[-3] != key[-3]
    if len(call.operands) == 4:
        return Resolution("...LE, ...SE, ...SV, ...LS -> ...LV") if not grouped else None
    return Resolution("...HLE, ...GSE, ...GSV -> ...HLV" if grouped else "...LE, ...SE, ...SV -> ...LV")
