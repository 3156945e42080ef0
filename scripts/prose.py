"""Check the prose of pages."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LONGEST_PAGE, LONGEST_LINE, LONGEST_SENTENCE = 250, 120, 35  # lines, characters, words
PARAGRAPH_ENDS = re.compile(r"^\s*$|^\s*(?:[-*]|\d+\.|>) |^#.*$|^\|.*$|^!\[.*$", re.MULTILINE)


def tracked(pattern: str) -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", pattern], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [ROOT / name for name in listed.stdout.split() if (ROOT / name).is_file() and not (ROOT / name).is_symlink()]


def sentences(page: str) -> list[str]:
    """Return the sentences of paragraphs and lists: no code, no tables, no headings."""
    text = re.sub(r"^```.*?^```$|^    [^\n]*$|<!--.*?-->", "\n", page, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`[^`]*`", "CODE", text)
    found = [" ".join(part.split()) for part in PARAGRAPH_ENDS.split(text)]
    return [one for part in found for one in re.split(r"(?<=[.?!])\s+(?=[A-Z`*\"(])", part) if len(one.split()) > 2]


def page_faults(path: Path) -> Iterator[str]:
    lines = path.read_text().splitlines()
    if len(lines) > LONGEST_PAGE:
        yield f"{len(lines)} lines, at most {LONGEST_PAGE}"
    for number, line in enumerate(lines, 1):
        if len(line) > LONGEST_LINE and not line.startswith(("|", "![")):
            yield f"line {number} has {len(line)} characters, at most {LONGEST_LINE}"
    for sentence in sentences(path.read_text()):
        if len(sentence.split()) > LONGEST_SENTENCE:
            yield f"a sentence of {len(sentence.split())} words, at most {LONGEST_SENTENCE}: {sentence[:60]}…"


if __name__ == "__main__":
    written = [page for page in tracked("docs/*.md") if "results" not in page.parts or page.name == "README.md"]
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *written]
    faults = [f"{page.relative_to(ROOT)}: {fault}" for page in pages for fault in page_faults(page)]
    print("\n".join(faults))
    sys.exit(bool(faults))
