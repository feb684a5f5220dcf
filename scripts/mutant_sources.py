"""Generate mutants of the sources: one changed operator, bound, term, stride or barrier each.

C++ mutants are compiled in one build. Each is text that has an effect only while its number is the
value of `fused_attn_mutant`, a variable of the module. Python mutants are other texts of a line.
"""

from __future__ import annotations

import ast
import random
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SOURCES = {
    "cpu": ["csrc/cpu/kernels/*.h", "csrc/block_ranges.h", "csrc/bind_[cf]*.h"],
    "cuda": ["csrc/cuda/[!i]*.cuh"],  # without intrinsics.cuh, which the emulator replaces
    "triton": ["fused_attn/backends/triton/*.py"],
    "masks": [
        "fused_attn/masks/*.py",
        "fused_attn/call/validation.py",
        "fused_attn/ops/decode_step.py",
        "fused_attn/distributed/checksum.py",
        "fused_attn/distributed/visible_keys.py",
    ],
}
SWITCH = "@"  # true while the mutant is on
MAX_MUTANTS = 4096  # in a module


class Mutant(NamedTuple):
    path: str
    line: int  # from 1
    kind: str
    begin: int  # columns of the text that is replaced
    end: int
    text: str

    def apply(self, line: str, switch: str = SWITCH) -> str:
        return line[: self.begin] + self.text.replace(SWITCH, switch) + line[self.end :]


class Change(NamedTuple):
    kind: str
    begin: int
    end: int
    text: str


def sample(source: str, seed: int, count: int, root: Path = ROOT) -> list[Mutant]:
    """Return `count` mutants of the files of a source, at most one a line."""
    lines = defaultdict(list)
    for path in sorted(path for pattern in SOURCES[source] for path in root.glob(pattern)):
        name, text = str(path.relative_to(root)), path.read_text()
        for mutant in (python_mutants if path.suffix == ".py" else cpp_mutants)(name, text):
            lines[mutant.path, mutant.line].append(mutant)
    generator = random.Random(f"{source} {seed}")
    chosen = sorted(lines)
    generator.shuffle(chosen)  # a larger count adds mutants, and changes none
    return [generator.choice(lines[line]) for line in chosen[:count]]


# ---- C++ ----------------------------------------------------------------------------------------

_SKIPPED = re.compile(r'^\s*(#|template\b|using\b)|\b(constexpr|static_assert|operator|asm)\b|"')
_CONSTANT_LOOP = re.compile(r"\bfor \(.* < (k[A-Z]|\d)")  # may have to be unrolled
_BARRIER = re.compile(r"^\s*(?=[\w.:]*(sync|commit|wait|fence)\w*\(.*\);$)")
_ASSIGNMENT = re.compile(r"^\s*(?=[*\w.\[\]>-]+ [-+*|&]?= [^;{]*;$)")
_OPERATOR = re.compile(r" (<=?|>=?|[=!]=|\+|-|\*|&&|\|\||\?) ")
_BEFORE_NUMBER = {"<": "< @ +", "<=": "<= -@ +", ">": "> -@ +", ">=": ">= @ +"}
# What ends the right operand of an operator, beside brackets, commas and semicolons.
_LOGIC_END = r" && | \|\| | \? | : "
_ENDS = {"||": r" \|\| | \? | : ", "*": r" [-+*/%<>=!&|^?:]+ "}


def cpp_mutants(path: str, text: str) -> Iterator[Mutant]:
    for number, line in enumerate(text.splitlines(), 1):
        for change in _cpp_changes(line.partition("//")[0].rstrip()):
            yield Mutant(path, number, *change)


def _cpp_changes(code: str) -> Iterator[Change]:
    if _SKIPPED.search(code):
        return
    for kind, pattern in {"barrier": _BARRIER, "statement": _ASSIGNMENT}.items():
        if match := pattern.match(code):
            yield Change(kind, match.end(), match.end(), f"if (!{SWITCH}) ")
    if match := re.match(r"\s*if \((?!.*;.*\))", code):
        yield Change("guard", match.end(), match.end(), f"!{SWITCH} && ")
    for match in re.finditer(r"\b(min|max)64(?=\()", code):
        other = "max64" if match[1] == "min" else "min64"
        yield Change("min or max", *match.span(), f"({SWITCH} ? {other} : {match[0]})")
    for match in re.finditer(r"(?<=strides\[)[0-3](?=\])", code):
        if "int64_t" not in code:
            other = "1012"[int(match[0])]
            yield Change("stride", *match.span(), f"{SWITCH} ? {other} : {match[0]}")
    for match in _OPERATOR.finditer(code):
        begin, end, operator = match.start() + 1, match.end() - 1, match[1]
        operand = _operand(code[match.end() :], _ENDS.get(operator, _LOGIC_END))
        whole = match.end() + len(operand)
        if operator in _BEFORE_NUMBER:
            if not _CONSTANT_LOOP.search(code):
                yield Change("comparison", begin, end, _BEFORE_NUMBER[operator])
        elif operator in "+-":
            yield Change("bound", begin, end, f"{operator} {SWITCH} {operator}")
            yield Change("term", begin, end, f"{operator} !{SWITCH} *")
        elif operator == "?":
            yield Change("choice", begin, end, f"!= {SWITCH} ?")
        elif operand and operator == "*":
            yield Change("factor", begin, whole, f"* ({SWITCH} ? 1 : {operand})")
        elif operand and operator == "&&":
            yield Change("logic", begin, whole, f"&& ({SWITCH} || ({operand}))")
        elif operand and operator == "||":
            yield Change("logic", begin, whole, f"|| (!{SWITCH} && ({operand}))")
        elif operand:
            yield Change("comparison", begin, whole, f"{operator} {operand} != {SWITCH}")


def _operand(code: str, ends: str) -> str:
    """Return the operand that begins a text, or "" if it does not end in this line."""
    depth = 0
    for match in re.finditer(rf"[(\[{{]|[)\]}},;]|{ends}", code):
        if match[0] in "([{":
            depth += 1
        elif depth == 0:
            return code[: match.start()]
        elif match[0] in ")]}":
            depth -= 1
    return ""


def with_switches(text: str, mutants: dict[int, Mutant]) -> str:
    """Insert the mutants of one C++ file, by their numbers."""
    lines = text.split("\n")
    for number, mutant in mutants.items():
        lines[mutant.line - 1] = mutant.apply(lines[mutant.line - 1], f"fused_attn_m({number})")
    return "\n".join(lines)


# ---- Python -------------------------------------------------------------------------------------

_PAIRS = [
    (ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot),
    (ast.In, ast.NotIn),  # codespell:ignore
    (ast.And, ast.Or), (ast.Add, ast.Sub), (ast.BitAnd, ast.BitOr),
]  # fmt: skip
_OTHER = {a: b for pair in _PAIRS for a, b in (pair, pair[::-1])}
_OTHER_CALL = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum"}
_SKIPPED_NODES = (ast.Raise, ast.Assert, ast.JoinedStr, ast.arguments)


def python_mutants(path: str, text: str) -> Iterator[Mutant]:
    """Yield mutants of the expressions in functions. Messages and annotations stay as they are."""
    tree, lines = ast.parse(text), text.splitlines()
    left_out = {id(n) for top in _not_mutated(tree) for n in ast.walk(top)}
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    nodes = {id(n): n for f in functions for top in f.body for n in ast.walk(top)}
    for key, node in nodes.items():
        if key in left_out or not isinstance(node, ast.expr) or node.lineno != node.end_lineno:
            continue
        if not lines[node.lineno - 1].isascii():  # columns of ast are in bytes
            continue
        for kind, changed in _python_changes(node):
            span = node.col_offset, node.end_col_offset
            yield Mutant(path, node.lineno, kind, *span, f"({ast.unparse(changed)})")


def _not_mutated(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        if isinstance(node, _SKIPPED_NODES):
            yield node
        elif isinstance(node, ast.AnnAssign):
            yield node.annotation
        elif isinstance(node, ast.FunctionDef):
            yield from [*node.decorator_list, *([node.returns] if node.returns else [])]


def _python_changes(node: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    match node:
        case ast.Compare(left, [op], comparators) if type(op) in _OTHER:
            yield "comparison", ast.Compare(left, [_OTHER[type(op)]()], comparators)
        case ast.BoolOp(op, values):
            yield "logic", ast.BoolOp(_OTHER[type(op)](), values)
            yield "term", ast.BoolOp(op, values[:-1])
        case ast.BinOp(left, ast.Add() | ast.Sub() | ast.BitAnd() | ast.BitOr() as op, right):
            if not isinstance(left, ast.Constant | ast.JoinedStr):
                yield "operator", ast.BinOp(left, _OTHER[type(op)](), right)
                yield "term", left
        case ast.BinOp(left, ast.Mult(), _):
            yield "factor", left
        case ast.Constant(int() as value) if not isinstance(value, bool):
            yield "bound", ast.Constant(value + 1)
        case ast.Call(ast.Name(name) as call, arguments, keywords) if name in _OTHER_CALL:
            changed = ast.Name(_OTHER_CALL[call.id])
            yield "min or max", ast.Call(changed, arguments, keywords)
        case ast.Call(ast.Attribute(of, name), arguments, keywords) if name in _OTHER_CALL:
            yield "min or max", ast.Call(ast.Attribute(of, _OTHER_CALL[name]), arguments, keywords)
        case ast.UnaryOp(ast.Not(), operand):
            yield "logic", operand
        case ast.IfExp(test, body, orelse):
            yield "choice", ast.IfExp(test, orelse, body)


def by_path(mutants: Sequence[Mutant], numbers: Iterable[int]) -> dict[str, dict[int, Mutant]]:
    """Return the mutants of these numbers, which begin at 1, by file and number."""
    files: dict[str, dict[int, Mutant]] = defaultdict(dict)
    for number in numbers:
        files[mutants[number - 1].path][number] = mutants[number - 1]
    return files
