"""Check the prose of the project: lengths of pages, lines and sentences, and words that it no longer uses."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LONGEST_PAGE, LONGEST_LINE, LONGEST_SENTENCE = 250, 120, 35  # lines, characters, words
# Retired words and what to write, for pages, comments, docstrings and messages alike. Add a word once nothing uses it and
# it has no other sense in the project.
RETIRED = {
    "anew": "again, or from scratch",
    "clairvoyant": "oracle",
    "copied tokens": "n-gram tokens",
    "drawn towards": "shrunk towards",
    "feed prompts": "prefill",
    "for ever": "permanently",
    "hand out": "send",
    "hand over": "pass",
    "handed on": "passed",
    "liar": "faulty worker",
    "play a length": "select an arm",
    "put out": "generate",
    "puts out": "generates",
    "set apart": "isolated",
    "speed of the moment": "level",
    "sum of surprises": "CUSUM",
    "teaches nothing": "is not a usable sample",
    "thinning": "sampling",
    "turnstile": "admission queue",
}
RETIRED_WORD = re.compile(rf"\b({'|'.join(RETIRED)})s?\b", re.IGNORECASE)
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


def retired_words(path: Path) -> Iterator[str]:
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        for word in RETIRED_WORD.findall(line):
            yield f"line {number} says {word!r}: write {RETIRED[word.lower()]!r}"


if __name__ == "__main__":
    written = [page for page in tracked("docs/*.md") if "results" not in page.parts or page.name == "README.md"]
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *written]
    faults = [f"{page.relative_to(ROOT)}: {fault}" for page in pages for fault in page_faults(page)]
    texts = [path for pattern in ("*.md", "*.py", "*.sql", "*.proto", "*.yaml") for path in tracked(pattern)]
    for path in texts:
        if path != Path(__file__).resolve() and not path.name.endswith(("_pb2.py", "_pb2_grpc.py")):
            faults += [f"{path.relative_to(ROOT)}: {fault}" for fault in retired_words(path)]
    print("\n".join(faults))
    sys.exit(bool(faults))
