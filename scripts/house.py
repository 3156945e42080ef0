"""Draw the folders of this project and which imports which into its architecture page: python scripts/house.py [--check].

An arrow A --> B says that a file of A imports one of B. Arrows that follow from others (A --> B --> C gives A --> C) are
left out. With --check nothing is written; the exit code says whether the document is what the code gives.
"""

from __future__ import annotations

import ast
import sys
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
    parts = module.split(".")
    if parts[0] in DIVIDED:
        return (
            "/".join(parts[:2])
            if len(parts) > 1 and (ROOT / parts[0] / parts[1]).is_dir()
            else BESIDE.get(parts[0], "")
        )
    return "proto" if parts[0] == "v1" else parts[0]


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


def reachable(arrows: Arrows, room: str) -> set[str]:
    """All that a room imports, over any number of arrows."""
    found: set[str] = set()
    waiting = list(arrows[room])
    while waiting:
        below = waiting.pop()
        if below not in found:
            found.add(below)
            waiting += arrows[below]
    return found


def reduced(arrows: Arrows) -> Arrows:
    """The arrows that do not follow from others."""
    return {room: below - {far for near in below for far in reachable(arrows, near)} for room, below in arrows.items()}


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


def main() -> int:
    text = DOCUMENT.read_text()
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    made = f"{before}{BEGIN}\n{drawing()}\n{END}{after}"
    if "--check" not in sys.argv:
        DOCUMENT.write_text(made)
    elif made != text:
        print(
            "docs/explanation/architecture.md is not what the code gives: run python scripts/house.py", file=sys.stderr
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
