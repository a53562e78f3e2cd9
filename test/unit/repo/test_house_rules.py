"""The rules of docs/style.md that a syntax tree can check. Each test lists every place that breaks one."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache

import pytest

from fixtures.source_tree import Module, modules, report

MAX_FUNCTION_LINES = 120
MAX_FILE_LINES = 800
ABSTRACT_BASES = {"ABC", "Generic", "Protocol", "object"}
# filled while modules are imported, read afterwards
REGISTRIES = {"sglang.srt.configs.registries", "sglang.srt.utils.registry"}
MUTATORS = {"add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "setdefault", "update"}

Found = Iterator[tuple[int, str]]


def bare_names(node: ast.expr) -> str:
    """``a.b.c`` for a chain of names and attributes; other parts of the chain become ``?``."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{bare_names(node.value)}.{node.attr}"
    if isinstance(node, ast.Subscript):
        return bare_names(node.value)
    return "?"


def base_names(node: ast.ClassDef) -> set[str]:
    return {bare_names(base).split(".")[-1] for base in node.bases} - ABSTRACT_BASES


@cache
def classes_without_constructor() -> frozenset[str]:
    """Our classes whose construction does nothing: no ``__init__``, no decorator that writes one, no parent."""
    return frozenset(
        node.name
        for module in modules()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef)
        and not base_names(node)
        and not node.decorator_list
        and not any(isinstance(item, ast.FunctionDef) and item.name == "__init__" for item in node.body)
    )


def no_global(module: Module) -> Found:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Global):
            yield node.lineno, f"`global {', '.join(node.names)}`: pass the object to whoever needs it"


def environment_in_one_place(module: Module) -> Found:
    if module.name == "sglang.srt.utils.env":
        return
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and bare_names(node) in ("os.environ", "os.getenv", "os.putenv"):
            yield node.lineno, f"{bare_names(node)}: add the variable to utils/env.py and read it there"
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            for alias in node.names:
                if alias.name in ("environ", "getenv", "putenv"):
                    yield node.lineno, f"imports os.{alias.name}: add the variable to utils/env.py and read it there"


def device_in_one_place(module: Module) -> Found:
    if module.name == "sglang.srt.utils.device":
        return
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and bare_names(node).endswith("cuda.is_available"):
            yield node.lineno, "torch.cuda.is_available: ask the Device made at start"


def server_args_are_never_assigned_to(module: Module) -> Found:
    for node in ast.walk(module.tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
            targets = [node.target]
        elif isinstance(node, ast.Delete):
            targets = node.targets
        elif isinstance(node, ast.Call) and bare_names(node.func).split(".")[-1] in ("setattr", "__setattr__"):
            if node.args and "server_args" in bare_names(node.args[0]).split("."):
                yield node.lineno, "sets an attribute of ServerArgs: use derive()"
        for target in targets:
            if isinstance(target, (ast.Attribute, ast.Subscript)):
                if "server_args" in bare_names(target).split(".")[: -1 if isinstance(target, ast.Attribute) else None]:
                    yield node.lineno, f"assigns to {bare_names(target)}: ServerArgs is frozen, use derive()"


def constructors_call_their_parent(module: Module) -> Found:
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.ClassDef) or not base_names(node) - classes_without_constructor():
            continue
        for item in node.body:
            if isinstance(item, ast.FunctionDef) and item.name == "__init__":
                calls = [bare_names(n.func) for n in ast.walk(item) if isinstance(n, ast.Call)]
                if not any(call.endswith(".__init__") for call in calls):
                    yield item.lineno, f"{node.name}.__init__ does not call its parent's constructor"


def files_and_functions_are_short(module: Module) -> Found:
    lines = module.text.count("\n")
    if lines > MAX_FILE_LINES:
        yield 1, f"{lines} lines; the limit is {MAX_FILE_LINES}"
    for node in ast.walk(module.tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                yield node.lineno, f"{node.name} has {length} lines; the limit is {MAX_FUNCTION_LINES}"


def no_bare_except(module: Module) -> Found:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            yield node.lineno, "bare except: name what is expected"


def no_state_in_modules(module: Module) -> Found:
    """Containers made at module level may be constants, so what is looked for is code that changes one."""
    if module.name in REGISTRIES:
        return
    names = {
        target.id
        for node in module.tree.body
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target] if _annotated(node) else [])
        if isinstance(target, ast.Name)
    }
    for function in ast.walk(module.tree):
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        for node in ast.walk(function):
            changed = _changed_container(node)
            if changed in names:
                yield node.lineno, f"{function.name} changes the module's {changed}: keep state in an object"


def _annotated(node: ast.stmt) -> bool:
    return isinstance(node, ast.AnnAssign)


def _changed_container(node: ast.AST) -> str | None:
    """Name of the container that this node changes in place, if it does."""
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, (ast.Store, ast.Del)):
        return bare_names(node.value)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
        return bare_names(node.func.value)
    return None


RULES = (
    no_global,
    environment_in_one_place,
    device_in_one_place,
    server_args_are_never_assigned_to,
    constructors_call_their_parent,
    files_and_functions_are_short,
    no_bare_except,
    no_state_in_modules,
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_sources_keep(rule) -> None:
    report([f"{m.at(line)}: {message}" for m in modules() for line, message in rule(m)])


# One offence per rule: a rule that finds nothing here would find nothing anywhere.
OFFENCES = {
    no_global: "def f():\n    global x\n    x = 1\n",
    environment_in_one_place: "import os\nx = os.environ.get('A')\n",
    device_in_one_place: "import torch\nx = torch.cuda.is_available()\n",
    server_args_are_never_assigned_to: "def f(self):\n    self.server_args.port = 1\n",
    constructors_call_their_parent: "class A(B):\n    def __init__(self):\n        self.x = 1\n",
    files_and_functions_are_short: "def f():\n" + "    pass\n" * MAX_FUNCTION_LINES,
    no_bare_except: "try:\n    pass\nexcept:\n    pass\n",
    no_state_in_modules: "CACHE = {}\ndef f(k):\n    CACHE[k] = 1\n",
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_finds_its_offence(rule, tmp_path) -> None:
    text = OFFENCES[rule]
    module = Module("sglang.offence", tmp_path / "offence.py", text, ast.parse(text))
    assert len(list(rule(module))) == 1
