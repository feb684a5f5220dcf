"""Titles of benchmark cases in tables, with sizes and masks instead of the names in shapes.py."""

from __future__ import annotations

import shapes

_MASKS = {
    "blocks": "block-diagonal",
    "ragged_blocks": "ragged block-diagonal",
    "prefix": "prefix LM",
    "window": "sliding window",
    "causal+alibi": "causal, ALiBi",
    "causal_bottom_right": "causal",
}
_NOTES = {"blocks_alone": "block-diagonal as separate sequences"}
_NORMS = {problem[0].name: problem[0] for problem in shapes.NORMS["cpu"]}
_ATTENTION = {
    problem[0].name: problem[0]
    for problems in (shapes.FORWARD, shapes.BACKWARD, shapes.TRAINING, shapes.PACKED)
    for problem in problems["cpu"]
}


def title(group: str, name: str) -> str:
    """Return the title of a CPU case, such as "forward, B2 H8 L2048 D64, causal".

    Args:
        group: group of the record: forward, backward, training, packed, norm forward or norm
            backward.
        name: name of the problem in shapes.py.
    """
    if group.startswith("norm"):
        norm = _NORMS[name]
        parts = [f"{norm.rows} x {norm.columns}"]
        parts += ["dropout, residual"] if norm.residual else []
    else:
        problem = _ATTENTION[name]
        parts = [_sizes(problem)]
        if name in _NOTES:
            parts.append(_NOTES[name])
        elif problem.mask != "none":
            parts.append(_MASKS.get(problem.mask, problem.mask))
        parts += [f"dropout {problem.dropout_p}"] if problem.dropout_p else []
        parts += [f"softcap {problem.softcap:.0f}"] if problem.softcap else []
        parts += ["learned bias"] if problem.bias else []
    return ", ".join(["packed training" if group == "packed" else group, *parts])


def _sizes(problem: shapes.Attention) -> str:
    size = problem.size
    heads = f"H{size.num_heads}"
    heads += "" if size.num_heads == size.num_heads_kv else f"/{size.num_heads_kv}"
    same = size.seqlen_q == size.seqlen_k
    length = f"L{size.seqlen_q}" if same else f"Lq{size.seqlen_q} Lk{size.seqlen_k}"
    return f"B{size.batch} {heads} {length} D{size.head_dim}"
