"""Where each capability's code lies: ``python -m tests.rooms`` prints files, folders and lines.

``python -m tests.rooms NAME`` prints what else in the tree is about one: files of its own, and lines of others.
Exit code 1: a capability lies in more than two folders.

A file belongs to a capability if it lies in its folder, or if its code names it: by an import, a name or a key. Words
for people (comments, docstrings, help, errors) do not count.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PLACES = ("fedpriv", "clients", "server", "attacks")
MOST_FOLDERS = 2


class Capability(NamedTuple):
    """A capability: its folder, and what code that knows it has in a name, an import or a text."""

    folder: str
    words: str


CAPABILITIES = {
    "pate": Capability("fedpriv/algorithms/pate", r"\bpate\b|Pate[A-Z]|_pate|pate_"),
    "erm": Capability("fedpriv/algorithms/erm", r"\berm\b|Erm[A-Z]|_erm\b|\berm_"),
    "labels": Capability(
        "fedpriv/algorithms/labels", r"label_epsilon|label_correction|changes_labels|surveys_labels|LabelSurvey"
    ),
    "secure aggregation": Capability(
        "fedpriv/algorithms/secure_aggregation", r"algorithms\.secure_aggregation|masked_upload|[Ss]hamir"
    ),
    "prompts": Capability("fedpriv/prompts", r"\bprompts\b|\bicl\b|Prompt(?:ing|s)\b"),
    "service": Capability("fedpriv/service", r"\bservice\b|ServiceConfig|POLICIES|AnswerPolicy"),
    "robustness": Capability("fedpriv/robustness", r"robustness|Robustness"),
    "sweep": Capability("fedpriv/sweep", r"\bsweep\b|Sweep[A-Z]"),
    "diagnosis": Capability("fedpriv/diagnosis", r"\bdiagnosis\b|Diagnosis"),
    "deploy": Capability("fedpriv/deploy", r"\bdeploy\b"),
    "flower": Capability("fedpriv/flower", r"fedpriv\.flower|privatise"),
    "membership": Capability("attacks/membership", r"\bmembership\b|\bMembership\b"),
    "memorisation": Capability("attacks/memorisation", r"[Mm]emorisation"),
    "canaries": Capability("attacks/canaries", r"attacks\.canaries"),
    "sites": Capability("fedpriv/sites", r"fedpriv\.sites|Sites[A-Z]"),
    "endpoint": Capability("attacks/endpoint", r"attacks\.endpoint"),
    "evasion": Capability("attacks/evasion", r"[Ee]vasion|EVASIONS"),
    "texts": Capability("attacks/texts", r"attacks\.texts"),
    "own model": Capability("attacks/own_model.py", r"own_model"),
}


class Row(NamedTuple):
    """A capability's files, and the folders that they lie in; the folders below its own count as its own."""

    files: int
    folders: tuple[str, ...]
    lines: int


def measured(capability: Capability) -> Row:
    """Where a capability's code lies."""
    words = re.compile(capability.words)
    inside = f"{capability.folder}/"
    mine = [path for path in sources() if path.startswith(inside) or _names(ROOT / path, words)]
    folders = {capability.folder if path.startswith(inside) else str(Path(path).parent) for path in mine}
    return Row(len(mine), tuple(sorted(folders)), sum(len(_text(ROOT / path).splitlines()) for path in mine))


def _names(path: Path, words: re.Pattern[str]) -> bool:
    """Whether a file's code has one of the words; most files have none of them anywhere."""
    return bool(words.search(_text(path)) and words.search(spoken(path)))


@cache
def _text(path: Path) -> str:
    return path.read_text()


@cache
def sources() -> list[str]:
    """The Python files of the package."""
    listed = subprocess.check_output(["git", "ls-files", *(f"{place}/*.py" for place in PLACES)], cwd=ROOT, text=True)
    return [path for path in listed.split() if (ROOT / path).is_file()]


@cache
def spoken(path: Path) -> str:
    """The names, imports and keys of a file's code, a line each, without docstrings."""
    return "\n".join(_spoken(path))


def _spoken(path: Path) -> Iterator[str]:
    tree = ast.parse(_text(path))
    silent = {id(node.body[0].value) for node in ast.walk(tree) if _has_docstring(node)}
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)) if id(node) not in silent and " " not in text:
                yield text
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.alias(name=name) | ast.arg(arg=name):
                yield name
            case ast.keyword(arg=str(name)) | ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.ImportFrom(module=str(name)):
                yield name


def traces(name: str) -> tuple[list[str], list[str]]:
    """What the tree has of a capability outside its folder: files with its name, and lines of others that know it."""
    capability, word = CAPABILITIES[name], name.replace(" ", "[ _-]")
    named = re.compile(rf"(?<![a-z]){word}(?![a-z])")
    paths = rf"/{word}/|\b{word}\.(?:md|toml|csv)\b|\b{word.upper()}\b|{capability.folder.replace('/', '[./]')}"
    known = re.compile("|".join((capability.words, paths, *map(re.escape, _written(capability)))))
    listed = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()
    others = [path for path in listed if not path.startswith(capability.folder) and (ROOT / path).is_file()]
    files = [path for path in others if named.search(path)]
    files += _pictures(path for path in files if path.startswith("docs/") and path.endswith(".md"))
    rest = [path for path in others if path not in files and path not in ("CHANGELOG.md", "SECURITY.md")]
    return files, [line for path in rest for line in _lines(path, known)]


def _lines(path: str, known: re.Pattern[str]) -> Iterator[str]:
    for number, line in enumerate((ROOT / path).read_text(errors="replace").splitlines(), 1):
        if known.search(line):
            yield f"{path}:{number}: {line.strip()}"


def _pictures(pages: Iterable[str]) -> list[str]:
    """The pictures that pages show."""
    return [
        f"docs/{name}" for page in pages for name in re.findall(r"!\[[^]]*\]\((images/[^)]+)\)", _text(ROOT / page))
    ]


def _written(capability: Capability) -> set[str]:
    """The JSON files of a run that its code alone names."""
    names: dict[bool, set[str]] = {True: set(), False: set()}
    for path in sources():
        names[path.startswith(capability.folder)] |= set(
            re.findall(r"^\w+\.jsonl?$", spoken(ROOT / path), re.MULTILINE)
        )
    return names[True] - names[False]


def _has_docstring(node: ast.AST) -> bool:
    kinds = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    return isinstance(node, kinds) and ast.get_docstring(node, clean=False) is not None


def main() -> None:
    """Print the table, or what is about one capability."""
    if len(sys.argv) > 1:
        if sys.argv[1] not in CAPABILITIES:
            sys.exit(f"no capability {sys.argv[1]!r}; there are: {', '.join(CAPABILITIES)}")
        files, lines = traces(sys.argv[1])
        print(*files, "", *lines, sep="\n")
        return
    rows = {name: measured(capability) for name, capability in CAPABILITIES.items()}
    print(f"{'capability':<20}{'files':>6}{'folders':>9}{'lines':>8}")
    for name, row in rows.items():
        print(f"{name:<20}{row.files:>6}{len(row.folders):>9}{row.lines:>8}")
        if len(row.folders) > MOST_FOLDERS:
            print(*(f"    {folder}" for folder in row.folders), sep="\n")
    sys.exit(any(len(row.folders) > MOST_FOLDERS for row in rows.values()))


if __name__ == "__main__":
    main()
