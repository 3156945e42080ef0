"""Draw the folders of this project and which imports which into its architecture page: python scripts/house.py [--check].

An arrow A --> B says that a file of A imports one of B. Arrows that follow from others (A --> B --> C gives A --> C) are
left out. With --check nothing is written; the exit code says whether the document is what the code gives.
"""

from __future__ import annotations

import ast
import sys
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "explanation" / "architecture.md"
BEGIN, END = "<!-- house: made by python scripts/house.py -->", "<!-- house: end -->"
DIVIDED = ("bench", "cli", "controller", "integrations", "worker")  # shown by their folders
WHOLE = ("store", "transport")
BESIDE = {"cli": "cli"}  # rooms made of the modules beside the folders

Arrows = dict[str, set[str]]


def room_of(module: str) -> str:
    """The room of a module, both without `speclen.`; "" for a module beside the rooms, such as worker.config.

    The modules in cli/ itself are a room: the verbs of one module each.
    """
    top, _, rest = module.partition(".")
    folder = rest.partition(".")[0]
    if top not in DIVIDED:
        return "proto" if top == "v1" else top
    return f"{top}/{folder}" if folder and (ROOT / top / folder).is_dir() else BESIDE.get(top, "")


def imports_of(path: Path) -> set[str]:
    """Modules of ours that a file imports, without `speclen.`."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.removeprefix("speclen.") for name in names if name.startswith("speclen.")}


def arrows_between_rooms() -> Arrows:
    """For every room the rooms that it imports."""
    arrows: Arrows = {"proto": set()}
    for path in sorted(path for top in (*DIVIDED, *WHOLE) for path in (ROOT / top).rglob("*.py")):
        room = room_of(".".join(path.relative_to(ROOT).with_suffix("").parts))
        found = {room_of(name) for name in imports_of(path)}
        arrows.setdefault(room, set()).update(found - {room})
    arrows.pop("")
    return {room: below & arrows.keys() for room, below in arrows.items()}


def reduced(arrows: Arrows) -> Arrows:
    """The arrows that do not follow from others. Raises CycleError where they go round."""
    far: Arrows = {}
    for room in TopologicalSorter(arrows).static_order():
        far[room] = set().union(*({near} | far[near] for near in arrows[room]))
    return {room: near - set().union(*(far[other] for other in near)) for room, near in arrows.items()}


def purpose(room: str) -> str:
    """The first line of the room's docstring."""
    if room == "proto":
        return "The protocol and its generated stubs."
    return (ast.get_docstring(ast.parse((ROOT / room / "__init__.py").read_text())) or "").partition("\n")[0]


def num_modules(room: str) -> int:
    pattern = "*.py" if room in BESIDE else "**/*.py"
    return sum(path.name != "__init__.py" for path in (ROOT / room).glob(pattern) if "_pb2" not in path.name)


def drawing() -> str:
    """The picture, and a table of the rooms."""
    arrows = arrows_between_rooms()
    lines = ["```mermaid", "flowchart TD"]
    for top in ("cli", "bench", "worker", "controller", "store", "transport", "proto"):
        inside = [f'    {name(room)}["{room}"]' for room in sorted(arrows) if room.partition("/")[0] == top]
        lines += [f"    subgraph {top}_rooms[ ]", *inside, "    end"] if top in DIVIDED else inside
    for room, below in sorted(reduced(arrows).items()):
        lines += [f"    {name(room)} --> {name(other)}" for other in sorted(below)]
    lines += ["```", "", "| Folder | Modules | Holds |", "|---|---|---|"]
    lines += [f"| `{room}/` | {num_modules(room) or ''} | {purpose(room)} |" for room in sorted(arrows)]
    return "\n".join(lines)


def name(room: str) -> str:
    return room.replace("/", "_")


def main() -> None:
    text = DOCUMENT.read_text()
    before, _, rest = text.partition(BEGIN)
    made = f"{before}{BEGIN}\n{drawing()}\n{END}{rest.partition(END)[2]}"
    if "--check" not in sys.argv:
        DOCUMENT.write_text(made)
    elif made != text:
        sys.exit("docs/explanation/architecture.md is not what the code gives: run python scripts/house.py")


if __name__ == "__main__":
    main()
