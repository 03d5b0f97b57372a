"""Language models: word counts by hand, a Llama against its published text and transformers, an endpoint's stub."""

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedpriv.core.errors import InputError
from fedpriv.prompts.language import Counting, LanguageModel, Stories, Transformer, open_language
from fedpriv.prompts.remote import Http
from fedpriv.prompts.settings import LanguageConfig

DATA = Path(os.environ.get("FEDPRIV_DATA", "data"))
STORIES = DATA / "stories260k.npz"
needs_stories = pytest.mark.skipif(not STORIES.is_file(), reason="stories260k.npz is not in FEDPRIV_DATA")

PROMPT = "Text: red and round\nAnswer: yes\n\nText: red green\nAnswer: no\n\nText: a green one, GREEN\nAnswer:"


def test_words_are_counted() -> None:
    found = np.exp(Counting().next_token([PROMPT, "Text: red\nAnswer:"], [" yes", " no"]))
    # "green" occurs in the block of "no" once; nothing of "a green one" occurs in that of "yes".
    assert found == pytest.approx(np.array([[1 / 3, 2 / 3], [1 / 2, 1 / 2]]))
    assert not Counting.is_language_model
    with pytest.raises(InputError, match="counts words and writes nothing"):
        Counting().likeliest(PROMPT, 1)


def test_labels_that_begin_alike_are_refused() -> None:
    with pytest.raises(InputError, match=r"'same' and 'same ' begin|'same' and 'same' begin"):
        Counting().check([" same", "  same"])


# ---- a Llama of our own ---------------------------------------------------------------------------------------------


@pytest.fixture
def stories() -> Stories:
    return Stories(STORIES)


@needs_stories
def test_it_writes_the_published_story(stories: Stories) -> None:
    """llama2.c's doc/stories260K.md prints what the model writes at temperature 0."""
    begin = (
        "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. One day, she saw "
        "a big, red ball. She wanted to play with it, but it was too high.\nLily's mom said, \"Lily, let's"
    )
    assert stories.write("", 45).startswith(begin[:110])


@needs_stories
def test_its_probabilities_add_up(stories: Stories) -> None:
    everything = np.logaddexp.reduce(stories._scores([1, 403, 407]))
    assert everything == pytest.approx(0, abs=1e-12)
    first = stories.next_token(["Once upon a"], [" time", " dog"])
    assert first.shape == (1, 2)
    assert first[0, 0] > np.log(0.9)


@needs_stories
def test_a_prompt_that_is_too_long_loses_its_beginning(stories: Stories) -> None:
    stories._network.context = 20
    tokens = [1, *([403, 407] * 15)]
    assert stories._scores(tokens) == pytest.approx(stories._scores([1, *tokens[-19:]]))


@needs_stories
def test_it_agrees_with_transformers(stories: Stories) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (fedpriv[icl])")
    import torch

    width, hidden, layers, heads, shared, vocabulary, longest = (int(n) for n in np.load(STORIES)["config"])
    config = transformers.LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=hidden, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=shared, max_position_embeddings=longest, rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).double().eval()
    model.load_state_dict(_renamed(dict(np.load(STORIES)), heads, shared), strict=False)
    tokens = [1, *stories.tokens("Lily and Tom went to the park. They saw a")]
    with torch.inference_mode():
        other = model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1).numpy()
    # Transformers computes its rotary angles in float32.
    assert stories._scores(tokens) == pytest.approx(other, abs=1e-4)


def _renamed(weights: Any, heads: int, shared: int) -> dict[str, Any]:
    """Transformers turns the halves of a head, llama2.c neighbours: rows of queries and keys are put in its order."""
    import torch

    names = {"wq": "self_attn.q_proj", "wk": "self_attn.k_proj", "wv": "self_attn.v_proj", "wo": "self_attn.o_proj",
             "w1": "mlp.gate_proj", "w2": "mlp.down_proj", "w3": "mlp.up_proj", "attention_norm": "input_layernorm",
             "ffn_norm": "post_attention_layernorm"}  # fmt: skip
    state = {"model.embed_tokens.weight": weights["tok_embeddings"], "model.norm.weight": weights["norm"]}
    state["lm_head.weight"] = weights["tok_embeddings"]
    for layer in range(len(weights["wq"])):
        for name, other in names.items():
            values = weights[name][layer]
            if name in ("wq", "wk"):
                count = heads if name == "wq" else shared
                parts = values.reshape(count, -1, 2, values.shape[1])
                values = parts.transpose(0, 2, 1, 3).reshape(values.shape)
            state[f"model.layers.{layer}.{other}.weight"] = values
    return {name: torch.from_numpy(np.ascontiguousarray(values)).double() for name, values in state.items()}


def test_an_archive_that_is_something_else(tmp_path: Path) -> None:
    np.savez(tmp_path / "other.npz", x=np.zeros(3))
    with pytest.raises(InputError, match="lacks config"):
        Stories(tmp_path / "other.npz")


# ---- a folder --------------------------------------------------------------------------------------------------------


def test_a_folder_without_weights(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds no language model: there is no config.json"):
        Transformer(tmp_path, 4)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match=r"holds no language model: there is no \*.safetensors"):
        Transformer(tmp_path, 4)


def test_a_folder_reads_prefixes_once_and_says_the_same(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (fedpriv[icl])")
    import torch

    (folder := tmp_path / "tiny").mkdir()
    _write_tokenizer(folder)
    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    language = Transformer(folder, 2)
    prefixes, endings = ["a", "a longer text", "b c"], ["\n\nText: x", "\n\nText: another"]
    shared = language.after(prefixes, endings, ["yes", "no"])
    plain = LanguageModel.after(language, prefixes, endings, ["yes", "no"])
    assert shared == pytest.approx(plain, abs=1e-4)
    assert language.next_token(["x" * 500], ["y"]).shape == (1, 1)
    with pytest.raises(InputError, match="begin with the same token"):
        language.check(["yes", "y"])
    assert len(language.likeliest("a", 5)) == 5


def _write_tokenizer(folder: Path) -> None:
    """Bytes as tokens."""
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for character in sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[character] = len(vocabulary)
    whole = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], unk_token="<unk>"))
    whole.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    whole.decoder = tokenizers.decoders.ByteLevel()
    whole.save(str(folder / "tokenizer.json"))
    kept = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(kept))


# ---- an endpoint ----------------------------------------------------------------------------------------------------

OPENAI = {"choices": [{"logprobs": {"top_logprobs": [{" yes": -0.1, " n": -3.0, "o": -4.0}]}}]}
LLAMA_CPP = {
    "choices": [
        {
            "logprobs": {
                "content": [{"top_logprobs": [{"token": " yes", "logprob": -0.1}, {"token": " n", "logprob": -3}]}]
            }
        }
    ]
}


@pytest.fixture
def endpoint() -> Iterator[tuple[str, list[Any], dict[str, Any]]]:
    """An endpoint on the loopback: its address, what it was asked, and what it answers."""
    asked: list[Any] = []
    reply: dict[str, Any] = {"body": OPENAI, "status": 200}

    class Stub(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
            self.send_response(reply["status"])
            for name, value in reply.get("headers", {}).items():
                self.send_header(name, value)
            self.end_headers()
            answer = reply.get("raw") or json.dumps(reply["body"]).encode()
            with suppress(OSError):  # whoever asked waits no longer
                for at in range(0, len(answer), reply.get("piece", len(answer))):
                    self.wfile.write(answer[at : at + reply.get("piece", len(answer))])
                    time.sleep(reply.get("pause", 0.0))

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with HTTPServer(("127.0.0.1", 0), Stub) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1", asked, reply
        server.shutdown()
        thread.join()


def http(url: str, **settings: Any) -> Http:
    return Http(LanguageConfig(name="http", url=url, served="m", top=7, **settings))


@pytest.mark.parametrize(("body", "floor"), [(OPENAI, -4.0), (LLAMA_CPP, -3.0)])
def test_an_endpoint_is_asked_for_log_probabilities(endpoint: Any, body: Any, floor: float) -> None:
    url, asked, reply = endpoint
    reply["body"] = body
    found = http(url).next_token(["Text"], [" yes", " no", " maybe"])
    # " n" begins "no" and nothing else; nothing begins "maybe", which gets what it does not exceed.
    assert found.tolist() == [[-0.1, -3.0, floor]]
    path, question = asked[0]
    assert (path, question["prompt"], question["logprobs"]) == ("/v1/completions", "Text", 7)
    assert (question["model"], question["max_tokens"], question["temperature"]) == ("m", 1, 0)


def test_an_endpoint_writes(endpoint: Any) -> None:
    url = endpoint[0]
    assert http(url).likeliest("a", 2) == (" yes", " n")
    assert http(url).write("a", 3) == " yes yes yes"


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        ({"body": {"choices": [{"logprobs": None}]}, "status": 200}, "gives no log-probabilities"),
        ({"body": {"choices": []}, "status": 200}, "gives no log-probabilities"),
        ({"body": {"choices": [{"logprobs": {"top_logprobs": [{"a": 3.0}]}}]}, "status": 200}, "gives no log-prob"),
        ({"body": [], "status": 200}, "gives no log-probabilities"),
        ({"raw": b"[" * 200_000, "status": 200}, "gives no log-probabilities"),
        ({"body": {"choices": [{"logprobs": {"top_logprobs": [{"a": -(10**400)}]}}]}, "status": 200}, "gives no log-p"),
        ({"body": {}, "status": 404}, "refuses the question: HTTP 404"),
        ({"body": {}, "status": 302, "headers": {"Location": "http://192.0.2.1/"}}, "refuses the question: HTTP 302"),
    ],
)
def test_what_is_no_answer_is_one_line(endpoint: Any, reply: dict[str, Any], words: str) -> None:
    url, _, replies = endpoint
    replies.clear()
    replies.update(reply)
    with pytest.raises(InputError, match=words) as raised:
        http(url).next_token(["a"], [" yes"])
    assert "\n" not in str(raised.value)


def test_the_timeout_is_of_the_whole_request(endpoint: Any) -> None:
    """Each read comes in time, all of them do not."""
    url, _, replies = endpoint
    replies.update({"piece": 20, "pause": 0.1})
    with pytest.raises(InputError, match=r"not within 0\.25 s \(model\.timeout\)"):
        http(url, timeout=0.25).next_token(["a"], [" yes"])
    assert http(url, timeout=60).next_token(["a"], [" yes"]).shape == (1, 1)


def test_an_endpoint_that_is_not_there() -> None:
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        port = server.server_port
    with pytest.raises(InputError, match=r"does not answer: "):
        http(f"http://127.0.0.1:{port}/v1").next_token(["a"], [" yes"])


@pytest.mark.parametrize("url", ["http://192.0.2.1/v1", "https://example.com/v1", "http://127.0.0.1.example.com/v1"])
def test_other_machines_have_to_be_allowed(url: str) -> None:
    with pytest.raises(InputError, match="not on the loopback, and prompts hold private examples"):
        http(url)
    assert isinstance(open_language(LanguageConfig(name="http", url=url, remote=True), DATA), Http)


NO_URLS = ["ftp://127.0.0.1/v1", "127.0.0.1:80", "file:///etc/passwd", "http://[::1/v1", "http://127.0.0.1:99999/v1",
           "http://127.0.0.1/ü"]  # fmt: skip


@pytest.mark.parametrize("url", NO_URLS)
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(InputError, match="allowed are addresses such as"):
        http(url, remote=True)
