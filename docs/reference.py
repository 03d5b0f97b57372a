"""Write the reference pages of the site from the code: every key of an experiment, every command, every attack."""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import click
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from typer.cli import get_docs_for_click
from typer.main import get_command

from fedpriv.core.cli.app import app
from fedpriv.core.config.schema import json_schema


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    for name, lines in {"settings.md": _settings(), "commands.md": _commands(), "attack-list.md": _attacks()}.items():
        files.append(File.generated(config, name, content="\n".join(lines) + "\n"))
    return files


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
    codes = "0 done, 1 the run failed, 2 bad input (one line says what was given and what is allowed), 130 Ctrl-C"
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


def _row(*cells: str) -> str:
    return "| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in cells) + " |"
