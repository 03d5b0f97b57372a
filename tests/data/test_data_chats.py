"""Chats: rendered as transformers does, and the loss counts what its assistant mask counts."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from fedpriv.core.config import DataConfig, validated
from fedpriv.core.errors import InputError
from fedpriv.core.federated import example_losses
from fedpriv.core.names import START
from fedpriv.data.chats import ChatTemplate, Turn
from fedpriv.data.datasets import load_dataset
from fedpriv.data.tokenizers import NO_TARGET, TextFacts, Words, next_targets, next_tokens

SYSTEM = {"role": "system", "content": "Be kind."}
CHATS = [
    [SYSTEM, {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello you"}],
    [
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": "Two"},
        {"role": "user", "content": "Three"},
        {"role": "assistant", "content": "Four\nand five"},
    ],
    [{"role": "user", "content": [{"type": "text", "text": "Nobody answers"}]}],
    [{"role": "user", "content": "Last"}, {"role": "assistant", "content": "test"}],
]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}{% else %}{{ message.content }}<|im_end|>"
    "{% endif %}\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def written(tmp_path: Path, chats: list[Any], name: str = "chats.jsonl") -> str:
    path = tmp_path / name
    path.write_text("".join(json.dumps({"messages": chat, "who": "ann"}) + "\n" for chat in chats))
    return str(path)


def loaded(path: str, name: str = "text", **about: object) -> Any:
    text = {"text": "messages", "response": "assistant", "length": 96, "test_share": 0.25, **about}
    return load_dataset(validated(DataConfig, {"name": name, "path": path, "key": "who", "text": text}, "test"), 0)


def tokenizer(folder: Path, template: str = TEMPLATE) -> Any:
    """A byte-level BPE of transformers with special tokens and a template, saved in a folder."""
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet, special = tokenizers.pre_tokenizers.ByteLevel.alphabet(), ["<s>", "<|im_start|>", "<|im_end|>"]
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=special)
    made.train_from_iterator(["Hello you", "One Two Three Four and five assistant user"], trainer)
    own = transformers.PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="<|im_end|>")
    own.chat_template = template
    own.save_pretrained(folder)
    return own


@pytest.mark.parametrize("form", ["jsonl", "hub"])
def test_a_tokenizers_own_template(tmp_path: Path, form: str) -> None:
    """Tokens and what the loss counts are those of ``apply_chat_template(return_assistant_tokens_mask=True)``."""
    own = tokenizer(tmp_path / "model")
    path = written(tmp_path, CHATS)
    if form == "hub":
        parquet = tmp_path / "chats.parquet"
        pytest.importorskip("pandas").read_json(path, lines=True).drop(2).to_parquet(parquet)
        path = str(parquet)
    settings = {"tokenizer": "bpe", "vocabulary_file": str(tmp_path / "model/tokenizer.json")}
    data = loaded(path, {"jsonl": "text", "hub": "hub"}[form], **settings)
    chats = [CHATS[0], CHATS[1], *([CHATS[2]] if form == "jsonl" else [])]
    for chat, x, y in zip(chats, data.x_train.flatten(1), data.y_train, strict=True):
        plain = [{**m, "content": m["content"] if isinstance(m["content"], str) else "Nobody answers"} for m in chat]
        asked = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        found = own.apply_chat_template(plain, **asked)
        tokens = torch.tensor(found["input_ids"]) + 3
        assert x[0] == START and tokens[0] == 3 + own.bos_token_id
        assert torch.equal(x[1 : len(tokens)].long(), tokens[1:])
        learnt = functional.pad(y != NO_TARGET, (1, 0))[: len(tokens)]
        assert learnt.tolist() == [bool(each) for each in found["assistant_masks"]]
        assert int((y != NO_TARGET).sum()) == sum(found["assistant_masks"])


def test_chatml_where_the_tokenizer_has_no_template(tmp_path: Path) -> None:
    """The loss is the cross entropy of the assistants' bytes alone, summed by hand; ShareGPT's names mean the same."""
    data = loaded(written(tmp_path, CHATS), length=200)
    names = {"user": "human", "assistant": "gpt"}
    renamed = [[{"from": names.get(m["role"], m["role"]), "value": m["content"]} for m in chat] for chat in CHATS]
    assert data.digest == loaded(written(tmp_path, renamed, "other.jsonl"), length=200).digest
    text = "<|im_start|>user\nOne<|im_end|>\n<|im_start|>assistant\nTwo<|im_end|>\n"
    text += "<|im_start|>user\nThree<|im_end|>\n<|im_start|>assistant\nFour\nand five<|im_end|>\n"
    assert data.text.tokenizer.decode(data.x_train[1].flatten().tolist()) == text
    logits = torch.randn(1, 200, 259, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    places = [text.index("Two<") + at for at in range(len("Two<|im_end|>"))]
    places += [text.index("Four") + at for at in range(len("Four\nand five<|im_end|>"))]
    by_hand = -torch.stack([logits[0, at].log_softmax(-1)[3 + ord(text[at])] for at in places]).mean()
    torch.testing.assert_close(example_losses(logits, data.y_train[1:2])[0], by_hand)


def test_targets_between_marks() -> None:
    """Against a walk over the tokens."""
    generator = torch.Generator().manual_seed(0)
    for mark, until in (([3], [4]), ([3, 4], [5]), ([3, 3], [4, 4]), ([4], [])):
        for row in torch.randint(3, 6, (40, 9), generator=generator):
            counts, wanted, seen = False, [], []
            for token, following in zip(row[:-1].tolist(), row[1:].tolist(), strict=True):
                seen.append(token)
                counts = counts or seen[-len(mark) :] == mark
                counts = counts and not (until and seen[-len(until) :] == until)
                wanted.append(following if counts else NO_TARGET)
            assert next_targets(row, mark, until).tolist() == wanted


@pytest.mark.parametrize(
    ("chats", "about", "words"),
    [
        ([*CHATS, []], {}, "a chat without a message"),
        ([*CHATS, "Hi"], {}, "4 of 5 texts are chats; expected all or none"),
        ([*CHATS, [{"role": "user"}]], {}, "message 1: expected a role and a text"),
        ([*CHATS, [{**SYSTEM, "tool_calls": [{}]}]], {}, "message 1: tool_calls are not read"),
        ([*CHATS, ["Hi"]], {}, "message 1: expected a role and a text"),
        ([str(chat) for chat in CHATS], {}, "its chats are written as texts"),
        (CHATS, {"response": "###"}, "data.text.response = '###': of chats leave prompt out, and response may be"),
        ([*CHATS, [{"role": "user", "content": "x<|im_end|>"}]], {}, "1 of 5 chats have"),
    ],
)
def test_refused_chats(tmp_path: Path, chats: list[Any], about: dict[str, object], words: str) -> None:
    with pytest.raises(InputError) as raised:
        loaded(written(tmp_path, chats), **about)
    assert words in str(raised.value)


def test_a_template_that_refuses_a_chat_or_marks_nothing(tmp_path: Path) -> None:
    for template, words in (
        ("{{ raise_exception('no system, please') }}", "refuses a chat: no system, please"),
        ("{% for message in messages %}{{ message.content }}{% endfor %}", "does not mark where assistants speak"),
    ):
        tokenizer(tmp_path / "model", template)
        settings = {"tokenizer": "bpe", "vocabulary_file": str(tmp_path / "model/tokenizer.json")}
        with pytest.raises(InputError) as raised:
            loaded(written(tmp_path, CHATS), **settings)
        assert words in str(raised.value)


ASKED = "{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}<|end|>{% else %}<|assistant|>"
DONE = "{% endif %}{% endfor %}{{ '<|assistant|>' if add_generation_prompt }}"


@pytest.mark.parametrize(
    ("rest", "end"),
    [
        ("{{ m.content }}<|end|>" + DONE + "{{ '<e>' if not add_generation_prompt }}", "<|end|>"),
        ("{{ m.content }}<e>" + DONE + "{{ '<think>' if add_generation_prompt }}", "<e>"),
        ("{{ '<think></think>' if loop.last }}{{ m.content }}<e>\n" + DONE, "<e>"),
        ("{{ m.content }}{{ '<|return|>' if loop.last else '<|end|>' }}" + DONE, None),
        ("{{ m.content }}{{ '<|end|>' if loop.last }}" + DONE, None),
    ],
    ids=["phi", "deepseek r1", "qwen3", "gpt-oss", "no end between"],
)
def test_marks_of_templates(rest: str, end: str | None) -> None:
    """Where all texts end otherwise, prompts think, or a last message is another one; what has no marks is refused."""
    pytest.importorskip("transformers")
    template = ChatTemplate(ASKED + rest, "the test", (("eos_token", "<e>"),))
    if end is not None:
        assert template.marks == ("<|assistant|>", end)
        return
    with pytest.raises(InputError, match="does not mark where assistants speak"):
        _ = template.marks


def test_templates_that_name_the_day_give_the_same_text_each_day() -> None:
    pytest.importorskip("transformers")
    template = "\n  {% if messages %}\n {{ strftime_now('%d %b %Y') }}{% endif %}"
    assert ChatTemplate(template).render([Turn("user", "Hi")]) == "\n 2024-07-26"


@pytest.mark.parametrize("response", ["\n", "assistant"])
def test_a_response_that_the_tokenizer_does_not_know(response: str) -> None:
    """Without tokens, or with that of all unknown words, nothing would tell where the loss begins."""
    facts = TextFacts("next", Words(["one"], 64), response=response)
    with pytest.raises(InputError, match="the tokenizer word does not know it"):
        next_tokens(facts, [f"one{response}two"], [0], 8)
