"""Chats as texts: a tokenizer's own chat template, or ChatML, and the characters between which assistants speak."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from fedpriv.core.config.data import CorpusConfig
from fedpriv.core.errors import InputError, one_line, optional

ASSISTANT = "assistant"
_ROLES = {"human": "user", "gpt": ASSISTANT}  # as ShareGPT calls them
_NAMES = (("role", "content"), ("from", "value"))
# Templates may name the day; a data set is the same each day. What ends a block takes the line's end with it.
_TODAY = "{% macro strftime_now(form) %}2024-07-26{% endmacro %}\n"


class Turn(NamedTuple):
    """One message of a chat."""

    role: str
    content: str


def turns_of(where: str, messages: Sequence[object]) -> tuple[Turn, ...]:
    """Return the messages of a chat, objects with role and content, or with from and value."""
    turns = tuple(_turn(f"{where}: message {number}", message) for number, message in enumerate(messages, start=1))
    if not turns:
        raise InputError(f"{where}: a chat without a message")
    return turns


def _turn(where: str, message: object) -> Turn:
    known = message if isinstance(message, dict) else {}
    role, content = next(((known[role], known.get(text)) for role, text in _NAMES if role in known), (None, None))
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text") or "") for part in content)
    if known.get("tool_calls"):
        raise InputError(f"{where}: tool_calls are not read; write what is to be learnt into its content")
    if not isinstance(role, str) or not isinstance(content, str):
        raise InputError(f'{where}: expected a role and a text, such as {{"role": "user", "content": "Hello"}}')
    return Turn(_ROLES.get(role, role), content)


@dataclass(frozen=True)
class ChatTemplate:
    """How messages become one text; without ``source``, ChatML."""

    source: str = ""  # in Jinja, as the library transformers reads it
    where: str = "ChatML"  # names it in errors
    tokens: tuple[tuple[str, str], ...] = ()  # names of special tokens that it may use, and their texts

    @staticmethod
    def beside(vocabulary_file: str) -> ChatTemplate:
        """Return the template that lies next to a tokenizer.json."""
        template, config = template_files(vocabulary_file)
        try:
            said: dict[str, Any] = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
            given = template.read_text(encoding="utf-8") if template.is_file() else said.get("chat_template") or ""
        except (OSError, ValueError, AttributeError) as error:
            raise InputError(f"{config.parent}: no chat template can be read: {one_line(error)}") from None
        if isinstance(given, list):
            given = next((each["template"] for each in given if each.get("name") == "default"), "")
        tokens = {name: token.get("content") if isinstance(token, dict) else token for name, token in said.items()}
        texts = ((name, token) for name, token in tokens.items() if name.endswith("_token") and isinstance(token, str))
        return ChatTemplate(given, str(template if template.is_file() else config), tuple(texts))

    def render(self, turns: Sequence[Turn], prompts: bool = False) -> str:
        """Return the text of a chat; ``prompts``: with what stands before an assistant's next message."""
        if not self.source:
            text = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
            return f"{text}<|im_start|>{ASSISTANT}\n" if prompts else text
        library = optional("transformers.utils.chat_template_utils", "zoo", f"the chat template of {self.where}")
        chat = [turn._asdict() for turn in turns]
        about = {"chat_template": _TODAY + self.source, "add_generation_prompt": prompts, **dict(self.tokens)}
        try:
            (text,), _ = library.render_jinja_template([chat], **about)
        except Exception as error:  # noqa: BLE001 (a template raises what it likes)
            raise InputError(f"the chat template of {self.where} refuses a chat: {one_line(error)}") from None
        return str(text)

    @cached_property
    def marks(self) -> tuple[str, str]:
        """What stands before each message of an assistant, and behind it."""
        asked, answer = Turn("user", "7q"), Turn(ASSISTANT, "9a")
        prompted, twice = self.render([asked], prompts=True), self.render([asked, answer] * 2)
        question = self._open([asked], prompted)
        before, _, behind = self._open([asked, answer], twice).rpartition(answer.content)
        # Prompts may go on, as "<think>" does, and so may messages.
        begin, longer = sorted((prompted.removeprefix(question), before.removeprefix(question)), key=len)
        is_told = longer.startswith(begin)
        begin, end = begin or before.rpartition(asked.content)[2].strip(), behind.strip()
        if begin and end and is_told:
            heard = "".join(part.partition(end)[0] for part in twice.split(begin)[1:])
            if asked.content not in heard and heard.count(answer.content) == 2:
                return begin, end
        raise InputError(
            key="data.text.response", given=ASSISTANT, allowed=f"{self.where} does not mark where assistants speak"
        )

    def _open(self, turns: Sequence[Turn], longer: str) -> str:
        """The text of a chat, without the end of all texts that a longer one has later."""
        text = self.render(turns)
        return text if longer.startswith(text) else text.removesuffix(dict(self.tokens).get("eos_token", ""))

    def texts(self, chats: Sequence[Sequence[Turn]], where: str, marked: bool) -> list[str]:
        """Return the text of each chat; ``marked``: refuse those in which the marks do not tell who speaks."""
        begin = dict(self.tokens).get("bos_token", "")  # every text gets that token, which may not be there twice
        texts = [self.render(turns).removeprefix(begin) for turns in chats]
        if marked:
            odd = sum(not self._is_told(text, turns) for text, turns in zip(texts, chats, strict=True))
            if odd:
                marks = " or ".join(map(repr, self.marks))
                raise InputError(
                    f"{where}: {odd:,} of {len(texts):,} chats have {marks} elsewhere than around assistants' messages"
                )
        return texts

    def _is_told(self, text: str, turns: Sequence[Turn]) -> bool:
        begin, end = self.marks
        said = text.split(begin)[1:]
        ends = len(said) == sum(turn.role == ASSISTANT for turn in turns) and all(end in each for each in said)
        return ends and not any(mark in turn.content for turn in turns for mark in self.marks)


def template_files(vocabulary_file: str) -> tuple[Path, Path]:
    """Return where a template and the names of special tokens may lie, as transformers writes them."""
    folder = Path(vocabulary_file).parent
    return folder / "chat_template.jinja", folder / "tokenizer_config.json"


def open_template(config: CorpusConfig) -> ChatTemplate:
    """Return the template of the tokenizer that the settings name."""
    return ChatTemplate.beside(config.vocabulary_file) if config.vocabulary_file else ChatTemplate()
