"""Write the reference pages of the site from the code, and link each experiment on a page to the keys it sets.

The pages are the keys of an experiment, the commands, the attacks, the examples and the columns of a sweep's tables.
"""

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import click
from markdown.extensions.toc import slugify
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from typer.cli import get_docs_for_click
from typer.main import get_command

from fedpriv.core.cli.app import app
from fedpriv.core.cli.init import bundled_examples, head_comment
from fedpriv.core.config.experiment import json_schema
from fedpriv.sweep.record import all_fields, part_fields

_TOML = re.compile(r"^```toml.*?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    pages = {
        "settings": _settings(),
        "commands": _commands(),
        "attack-list": _attacks(),
        "examples": _examples(),
        "sweep-columns": _columns(),
    }
    for name, lines in pages.items():
        files.append(File.generated(config, f"{name}.md", content="\n".join(lines) + "\n"))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put under each experiment links to the settings of its sections."""
    return _TOML.sub(lambda block: "\n\n".join((block[0], *_links(tomllib.loads(block[1])))), markdown)


def _links(experiment: Mapping[str, Any]) -> Iterator[str]:
    """One line of links, to the named kind of a section where there are several; a sweep's are those that it sets."""
    base = experiment.get("base")
    sections = dict(base if isinstance(base, dict) else experiment)
    sections |= experiment.get("grid", {}) | experiment.get("set", {})
    found = []
    for name, keys in sections.items():
        kind = f'{name}.name = "{keys.get("name")}"' if isinstance(keys, dict) else ""
        anchors = [slugify(text, "-") for text in (kind, f"[{name}]") if slugify(text, "-") in _anchors()]
        found += [f"[`[{name}]`](settings.md#{anchors[0]})"] if anchors else []
    if found:
        yield f"<small>Keys: {', '.join(found)}</small>"


@cache
def _anchors() -> frozenset[str]:
    return frozenset(slugify(line.strip("# `"), "-") for line in _settings() if line.startswith("##"))


def _settings() -> Iterator[str]:
    yield "# Settings"
    yield ""
    yield "Every key of an experiment file, by section. `fedpriv config show FILE` prints those of a file, resolved."
    schema = json_schema()
    yield from ("", "## Above the sections")
    yield from _section("", schema, schema["$defs"])


def _section(name: str, table: Mapping[str, Any], kinds: Mapping[str, Any]) -> Iterator[str]:
    """The keys of a table, then the tables inside it; attacks have a page of their own."""
    inside = {key: _kinds(node, kinds) for key, node in table["properties"].items()}
    plain = {key: node for key, node in table["properties"].items() if not inside[key]}
    yield from ("", table.get("description", "").partition("\n\n")[0], "")
    if plain:
        yield from _table(plain, f"{name}." if name else "")
    for key, found in inside.items():
        if found and name != "adversary":
            yield from _subsection(f"{name}.{key}" if name else key, found, kinds)


def _subsection(name: str, found: list[Mapping[str, Any]], kinds: Mapping[str, Any]) -> Iterator[str]:
    if len(found) == 1:
        yield from ("", f"{'###' if '.' in name else '##'} `[{name}]`", *_section(name, found[0], kinds))
        return
    yield from ("", f"## `[{name}]`")
    for kind in found:
        given = kind["properties"].get("name", {})
        yield from ("", f'### `{name}.name = "{given.get("const", given.get("default"))}"`')
        yield from _section(name, kind, kinds)


def _kinds(node: Mapping[str, Any], kinds: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The tables that a key may be: one, or one for each name, or those of a list; none for a plain key."""
    found = [node, node.get("items", {}), *node.get("oneOf", ()), *node.get("anyOf", ())]
    return [kinds[each["$ref"].rpartition("/")[2]] for each in found if "$ref" in each]


def _table(keys: Mapping[str, Mapping[str, Any]], prefix: str) -> Iterator[str]:
    yield "| key | default | allowed | meaning |"
    yield "| --- | --- | --- | --- |"
    for key, node in keys.items():
        default = "" if node.get("default") is None else f"`{json.dumps(node['default'])}`"
        yield _row(f"`{prefix}{key}`", default, _allowed(node), node.get("description", ""))


def _allowed(node: Mapping[str, Any]) -> str:
    if "anyOf" in node:
        return " or ".join(dict.fromkeys(_allowed(each) for each in node["anyOf"]))
    if "enum" in node:
        return ", ".join(f"`{json.dumps(value)}`" for value in node["enum"])
    if "const" in node:
        return f"`{json.dumps(node['const'])}`"
    if "$ref" in node:
        return "a table"
    words = {"null": "unset", "array": "a list", "object": "a table", "boolean": "`true`, `false`", "string": "text"}
    kind = node.get("type", "")
    bounds = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    limits = [f"{sign} {node[bound]:g}" for bound, sign in bounds.items() if bound in node]
    return " ".join((words.get(kind, kind), ", ".join(limits))).strip()


def _commands() -> list[str]:
    """What Typer says of all commands, as one page."""
    command = get_command(app)
    lines = get_docs_for_click(obj=command, ctx=click.Context(command), name="fedpriv").splitlines()
    codes = "0 done, 1 the run failed, 2 bad input (one line says what was given and what is allowed), 130 interrupted"
    return ["# Commands", "", f"Exit codes: {codes}.", *(line for line in lines if not line.startswith("# "))]


def _attacks() -> Iterator[str]:
    """What ``fedpriv attack list --json`` says."""
    listed = subprocess.run(
        [sys.executable, "-m", "fedpriv", "attack", "list", "--json"], capture_output=True, check=True, text=True
    )
    yield "# List of attacks"
    yield ""
    yield "What `fedpriv attack list` and `fedpriv probe list` print: each attack, its source, needs and settings."
    for attack in json.loads(listed.stdout):
        yield from ("", f"## `{attack['name']}`", "", f"{attack['title']}. Source: {attack['reference']}.", "")
        yield f"Needs {'; '.join(need['meaning'] for need in attack['needs'])}."
        if attack["settings"]:
            yield from ("", "| key | default | meaning |", "| --- | --- | --- |")
            for each in attack["settings"]:
                yield _row(f"`{each['key']}`", f"`{json.dumps(each['default'])}`", each["meaning"])


def _examples() -> Iterator[str]:
    yield "# Examples"
    yield ""
    yield "The experiments and sweeps that `fedpriv init NAME` writes; they lie in `configs/`."
    yield from ("", "| name | what it is |", "| --- | --- |")
    for name, path in bundled_examples().items():
        yield _row(f"`{name}`", head_comment(path)[0])


def _columns() -> Iterator[str]:
    yield "# Columns of a sweep's tables"
    yield ""
    yield "Columns of `results.parquet` and `results.csv`, one row a trial. `set.KEY` are the keys that the sweep set."
    parts = part_fields()
    plain = {name: field for name, field in all_fields().items() if name not in (*parts, "settings")}
    yield from ("", "| column | meaning |", "| --- | --- |")
    yield from (_row(f"`{name}`", field.description or "") for name, field in plain.items())
    for kind in parts.values():
        place = ".".join((kind.head, *map(str.upper, kind.keys)))
        yield from ("", f"## `{place}.`", "", (kind.__doc__ or "").partition("\n\n")[0], "")
        yield from ("| column | meaning |", "| --- | --- |")
        for name, field in kind.model_fields.items():
            yield _row(f"`{name}`", field.description or "")


def _row(*cells: str) -> str:
    return "| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in cells) + " |"
