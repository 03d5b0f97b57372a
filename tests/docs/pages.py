"""README and docs as their tests read them: pages, and the blocks of code in them."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

__all__ = ["PAGES", "ROOT", "Block", "blocks", "commands", "executed", "outside_blocks", "words"]

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))

FENCED = re.compile(r'^```(\w*)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """Code between fences; with a title the reader saves it under that name."""

    language: str
    title: str
    text: str


def blocks(page: Path) -> list[Block]:
    """The blocks of a page in order."""
    return [Block(*found) for found in FENCED.findall(page.read_text(encoding="utf-8"))]


def outside_blocks(page: Path) -> list[str]:
    """The lines of a page without those of its blocks."""
    return FENCED.sub("", page.read_text(encoding="utf-8")).splitlines()


def commands(block: Block) -> list[list[str]]:
    """The words of each command of a shell block."""
    lines = block.text.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def executed(*examples: str) -> dict[str, Any]:
    """Run examples one after the other in one namespace, as a reader who types them into one session."""
    names: dict[str, Any] = {"__name__": "__main__"}
    with torch.random.fork_rng(devices=[]):
        for example in examples:
            exec(compile(example, "<docs>", "exec"), names)
    return names


def words(text: str) -> str:
    """Words without line breaks and figures, which differ between machines."""
    return re.sub(r"\d[\d.,]*\d|\d", "N", " ".join(text.split()))
