"""Imports go down: the rank table of ``fixtures.source_tree`` holds for every module."""

from __future__ import annotations

import sys

from fixtures.source_tree import HTTP_RANK, TOP_RANK, Module, is_ours, modules, rank, report

CORE_LIBRARIES = {"torch", "transformers", "tokenizers", "safetensors", "numpy", "jinja2", "tqdm", "huggingface_hub"}
KERNEL_LIBRARIES = {"torch", "triton"}


def test_every_module_has_a_rank() -> None:
    report([f"{m.at(1)}: {m.name} lies in no package of the rank table" for m in modules() if rank(m.name) is None])


def test_imports_go_down() -> None:
    wrong = []
    for module in modules():
        own = rank(module.name)
        for item in module.imports():
            other = rank(item.module) if is_ours(item.module) else None
            if own is not None and other is not None and other > own:
                wrong.append(f"{module.at(item.line)}: rank {own} imports {item.module} of rank {other}")
    report(wrong)


def test_no_import_cycle() -> None:
    graph = {m.name: sorted({i.module for i in m.imports() if is_ours(i.module)} - {m.name}) for m in modules()}
    done: set[str] = set()
    cycles: list[str] = []

    def visit(name: str, path: tuple[str, ...]) -> None:
        if name in path:
            cycles.append(" -> ".join([*path[path.index(name) :], name]))
        elif name not in done:
            for target in graph.get(name, ()):
                visit(target, (*path, name))
            done.add(name)

    for name in graph:
        visit(name, ())
    report(cycles)


def test_our_modules_are_imported_at_the_top() -> None:
    report(
        [
            f"{m.at(i.line)}: imports {i.module} inside a function; only the entry points may load late"
            for m in modules()
            if rank(m.name) != TOP_RANK
            for i in m.imports()
            if i.in_function and is_ours(i.module)
        ]
    )


def test_core_needs_few_libraries() -> None:
    wrong = []
    for module in modules():
        allowed = _libraries_allowed(module)
        for item in module.imports():
            top = item.module.split(".")[0]
            if allowed is None or item.in_function or top in sys.stdlib_module_names or is_ours(top):
                continue
            if top not in allowed:
                wrong.append(f"{module.at(item.line)}: imports {top} when imported; allowed here: {sorted(allowed)}")
    report(wrong)


def test_kernels_know_nothing_of_the_engine() -> None:
    report(
        [
            f"{m.at(i.line)}: sgl_kernel imports {i.module}"
            for m in modules()
            if m.name.startswith("sgl_kernel")
            for i in m.imports()
            if i.module.startswith("sglang")
        ]
    )


def _libraries_allowed(module: Module) -> set[str] | None:
    """Third-party packages a module may need at import time; None when it may need any."""
    if module.name.startswith("sgl_kernel"):
        return KERNEL_LIBRARIES
    own = rank(module.name)
    return CORE_LIBRARIES if own is not None and own < HTTP_RANK else None
