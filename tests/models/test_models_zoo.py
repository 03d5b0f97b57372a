"""Networks of torchvision, timm and transformers by name, and what the settings change of them."""

import copy
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from typing_extensions import override

from fedpriv.core.config.experiment import describe
from fedpriv.core.errors import InputError
from fedpriv.core.federated import example_losses
from fedpriv.core.lab import start_run
from fedpriv.core.progress import Progress, Silent
from fedpriv.core.runs import RunFolder
from fedpriv.gradients import per_example_gradients
from fedpriv.gradients.calls import coupled_layers
from fedpriv.gradients.mixing import refuse_mixed_examples
from fedpriv.models import model_settings, recorded_model
from fedpriv.models.machinery.build import build_model
from fedpriv.models.machinery.settings import SequenceShape
from tests.cases import in_one_test
from tests.integration.small import experiment

IMAGES, GREY = (3, 32, 32), (1, 32, 32)
NEXT, LABELS = SequenceShape(8, 11, "byte", 11, True), SequenceShape(8, 11, "byte", 3, False)
SMALL = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
RWKV = {"hidden_size": 8, "num_hidden_layers": 7, "attention_hidden_size": 8}  # it scales layers from the sixth on


def needs(library: str) -> Any:
    absent = pytest.mark.skipif(find_spec(library) is None, reason=f"{library} is not installed (fedpriv[zoo])")
    return (pytest.mark.slow, absent)


def built(name: str, inputs: Any = IMAGES, **more: Any) -> nn.Module:
    settings = model_settings({"name": name, **more})
    if isinstance(inputs, SequenceShape):
        return build_model(settings, (1, 1, inputs.length), inputs.classes, 0, sequences=inputs)
    return build_model(settings, inputs, 5, 0)


def examples(inputs: Any) -> Tensor:
    draws = torch.Generator().manual_seed(0)
    if isinstance(inputs, SequenceShape):
        return torch.randint(3, inputs.vocabulary, (4, inputs.length), generator=draws)
    return torch.rand(4, *inputs, generator=draws)


@pytest.mark.parametrize(
    ("name", "inputs", "more"),
    [
        ("torchvision:squeezenet1_1", IMAGES, {}),
        ("torchvision:resnet18", GREY, {"norm": "group", "arguments": {"zero_init_residual": True}}),
        pytest.param("timm:test_vit", IMAGES, {}, marks=needs("timm")),
        pytest.param("timm:test_resnet", GREY, {"norm": "group"}, marks=needs("timm")),
        pytest.param("transformers:vit", GREY, {"config": {**SMALL, "patch_size": 8}}, marks=needs("transformers")),
        pytest.param("transformers:deit", IMAGES, {"config": {**SMALL, "patch_size": 8}}, marks=needs("transformers")),
        pytest.param("transformers:llama", NEXT, {"config": SMALL}, marks=needs("transformers")),
        pytest.param("transformers:mistral", NEXT, {"config": SMALL}, marks=needs("transformers")),
        pytest.param("transformers:rwkv", NEXT, {"config": RWKV}, marks=needs("transformers")),
        pytest.param("transformers:bert", LABELS, {"config": SMALL}, marks=needs("transformers")),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_name_is_a_network_of_the_data_s_size(name: str, inputs: Any, more: Any) -> None:
    """The settings written down build it again; one example is treated as it is among others."""
    network = built(name, inputs, **more)
    assert not coupled_layers(network)
    settings = model_settings({"name": name, **more})
    again = recorded_model(settings.decisive())
    assert again == settings and again.version
    x, before = examples(inputs), copy.deepcopy(network.state_dict())
    whole = network.eval()(x)
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    classes = inputs.classes if isinstance(inputs, SequenceShape) else 5
    assert whole.shape[-1] == classes and whole.ndim == 2 + (inputs is NEXT)
    alone = torch.cat([network(each[None]) for each in x])
    assert torch.allclose(whole, alone, atol=1e-5)


def normed(shape: tuple[int, int, int] = IMAGES, classes: int = 5) -> nn.Module:
    """Maps of 32 x 32, of 1 x 1 with a channel a group, and vectors."""
    channels, _, _ = shape
    return nn.Sequential(
        nn.Conv2d(channels, 12, 3, padding=1), nn.BatchNorm2d(12, eps=1e-3), nn.AdaptiveAvgPool2d(1),
        nn.Conv2d(12, 32, 1), nn.BatchNorm2d(32, affine=False), nn.Flatten(), nn.BatchNorm1d(32),
        nn.Linear(32, classes),
    )  # fmt: skip


def test_every_batch_norm_is_replaced_and_a_single_example_is_taken() -> None:
    plain, network = built(f"{__name__}:normed"), built(f"{__name__}:normed", norm="group")
    assert [(layer.num_groups, layer.eps, layer.affine) for layer in network if isinstance(layer, nn.GroupNorm)] == [
        (4, 1e-3, True),
        (1, 1e-5, False),
        (1, 1e-5, True),
    ]
    assert {*dict(network.named_parameters())} == {*dict(plain.named_parameters())}
    assert all(torch.equal(value, dict(plain.named_parameters())[name]) for name, value in network.named_parameters())
    x = examples(IMAGES)
    assert torch.allclose(network(x)[:1], network(x[:1]), atol=1e-6)
    assert not list(network.buffers())


class Outputs(NamedTuple):
    logits: Tensor
    auxiliary: Tensor


class Auxiliary(nn.Linear):
    """In training it returns more than logits, as GoogLeNet does."""

    def forward(self, x: Tensor) -> Any:
        logits = super().forward(x.flatten(1))
        return Outputs(logits, logits + 1) if self.training else logits


def auxiliary(num_classes: int, scale: float = 1.0) -> nn.Module:
    network = Auxiliary(3 * 32 * 32, num_classes)
    network.weight.data *= scale
    return network


def test_a_network_s_trial_is_announced_before_it_takes_its_time(tmp_path: Path) -> None:
    heard: list[str] = []

    class Heard(Progress):
        @override
        def stage(self, title: str) -> None:
            heard.append(title)

    settings = experiment(model={"name": f"{__name__}:small"}, mechanism={"name": "gaussian", "sigma": 1.0})
    with pytest.raises(InputError, match="cannot take images"):
        start_run(settings, tmp_path / "run", "", Heard())
    assert len(heard) == 1 and heard[0].startswith(f"building {__name__}:small, and trying it on random examples")


def test_logits_are_taken_out_of_a_named_tuple() -> None:
    network, x = built(f"{__name__}:auxiliary"), examples(IMAGES)
    assert torch.equal(copy.deepcopy(network)(x), network.eval()(x))
    assert {*dict(network.named_parameters())} == {"weight", "bias"}


def test_arguments_go_to_a_function_of_ones_own() -> None:
    """It may take num_classes in place of the shape and classes."""
    one, two = (built(f"{__name__}:auxiliary", arguments={"scale": scale}).weight for scale in (1.0, 2))
    assert torch.equal(2 * one, two)
    assert built("torchvision.models:squeezenet1_1")(examples(IMAGES)).shape == (4, 5)


def small(shape: tuple[int, int, int], classes: int, width: int = 4) -> nn.Module:
    torch.manual_seed(1)
    convolution = nn.Conv2d(3, width, 3, padding=1)
    return nn.Sequential(
        convolution, nn.BatchNorm2d(width), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * width, classes)
    )


@in_one_test("classes", [5, 7])
@in_one_test("kind", ["safetensors", "torch", "checkpoint", "folder"])
def test_pretrained_weights_are_taken_over(classes: int, kind: str, tmp_path: Path) -> None:
    """A last layer of other classes, or none, stays new; what is GroupNorm keeps the weight of its BatchNorm."""
    theirs = {
        name: torch.randn_like(value, dtype=torch.float32)
        for name, value in small(IMAGES, classes).state_dict().items()
    }
    path = tmp_path / ("weights.safetensors" if kind in ("safetensors", "folder") else "weights.pt")
    if path.suffix == ".pt":
        torch.save(
            {"state_dict": {f"net._orig_mod.{name}": theirs[name] for name in theirs if classes == 5 or name[0] != "4"}}
            if kind == "checkpoint"
            else theirs,
            path,
        )
    else:
        save_file(theirs, path)
    given = str(tmp_path if kind == "folder" else path)
    network = built(f"{__name__}:small", pretrained=given, norm="group")
    drawn = dict(small(IMAGES, 5).named_parameters())
    for name, value in network.named_parameters():
        is_new = name.startswith("4.") and classes != 5
        assert torch.equal(value, drawn[name] if is_new else theirs[name]), name


@pytest.mark.parametrize(
    ("name", "first", "more"),
    [
        ("torchvision:squeezenet1_1", "features.0", {}),
        pytest.param("timm:test_vit", "patch_embed.proj", {}, marks=needs("timm")),
        pytest.param(
            "transformers:vit",
            "vit.embeddings.patch_embeddings.projection",
            {"config": {**SMALL, "patch_size": 8}},
            marks=needs("transformers"),
        ),
    ],
)
def test_pretrained_weights_see_a_grey_image_as_three_equal_channels(
    name: str, first: str, more: Any, tmp_path: Path
) -> None:
    """A folder of transformers has its own number of channels in its configuration."""
    colour, path = built(name, **more), str(tmp_path / "weights.safetensors")
    if more:
        colour.save_pretrained(tmp_path)  # type: ignore[operator]
        grey = built(f"transformers:{tmp_path}", GREY)
    else:
        save_file(colour.state_dict(), path)
        grey = built(name, GREY, pretrained=path)
    assert grey.get_submodule(first).in_channels == 1  # type: ignore[comparison-overlap]
    x = examples(GREY)
    assert torch.allclose(grey.eval()(x), colour.eval()(x.repeat(1, 3, 1, 1)), atol=1e-5)


def test_frozen_parameters_are_those_that_the_patterns_describe() -> None:
    network = built(f"{__name__}:small", freeze=["0.*", "*bias"])
    assert [name for name, value in network.named_parameters() if value.requires_grad] == ["1.weight", "4.weight"]
    assert model_settings({"name": f"{__name__}:small", "freeze": ["0.*"], "norm": "group"}).notes == (
        "GroupNorm in place of every BatchNorm",
        "frozen: 0.*",
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What transformers has saved."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (fedpriv[zoo])")
    pytest.importorskip("peft", reason="peft is not installed (fedpriv[zoo])")
    place = tmp_path_factory.mktemp("folders")
    torch.manual_seed(1)
    networks = {
        "llama": transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=13, eos_token_id=[2, 4], **SMALL)),
        "bert": transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=11, **SMALL)),
    }
    for name, network in networks.items():
        network.eval().save_pretrained(place / name)
    return {"place": place, **networks}


@pytest.mark.slow
def test_a_folder_s_network_knows_the_data_s_tokens(folders: dict[str, Any]) -> None:
    """Those of a file of byte pairs begin behind the three that all data have."""
    name, x = f"transformers:{folders['place']}/llama", examples(NEXT)
    expected = folders["llama"](x).logits
    assert torch.allclose(built(name, NEXT).eval()(x), expected[..., :11], atol=1e-6)
    pairs = SequenceShape(8, 16, "bpe", 16, True)
    assert torch.allclose(built(name, pairs).eval()(x + 3)[..., 3:], expected, atol=1e-6)


@pytest.mark.slow
def test_a_last_layer_is_new_and_another_network_s_weights_are_refused(folders: dict[str, Any]) -> None:
    place = folders["place"]
    network = built("transformers:bert", LABELS, config=SMALL, pretrained=f"{place}/bert/model.safetensors")
    own, theirs = network.state_dict(), folders["bert"].state_dict()
    assert all(torch.equal(value, own[f"network.{name}"]) for name, value in theirs.items() if name.startswith("bert."))
    for weights, layers, words in (
        ("llama", 2, "lacks bert.embeddings"),
        ("bert", 3, "lacks bert.encoder.layer.2"),
    ):
        with pytest.raises(InputError, match=f"model.pretrained = .*{words}"):
            built(
                "transformers:bert",
                LABELS,
                config={**SMALL, "num_hidden_layers": layers},
                pretrained=f"{place}/{weights}",
            )


@pytest.mark.slow
@in_one_test(
    "peft",
    [
        {"peft_type": "LORA", "r": 2, "target_modules": ["q_proj", "lm_head"]},
        {"peft_type": "IA3"},
        {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 2},
    ],
)
@in_one_test("inputs", [NEXT, LABELS])
def test_adapters_are_peft_s_and_saved_as_peft_reads_them(
    peft: Any, inputs: Any, folders: dict[str, Any], tmp_path: Path
) -> None:
    import peft as library

    keys = {**peft, "target_modules": ["q_proj"]} if inputs is LABELS and "r" in peft else peft
    more = {"name": f"transformers:{folders['place']}/llama", "inputs": inputs}
    network = built(**more, peft=keys)
    trained = {name for name, value in network.named_parameters() if value.requires_grad}
    assert trained and all("lora" in name or "ia3" in name or "prompt" in name or "score" in name for name in trained)
    model_settings({"name": more["name"], "peft": keys}).save(lambda: network, tmp_path)
    assert isinstance(library.PeftConfig.from_pretrained(str(tmp_path / "adapter")), library.PeftConfig)
    again, x = built(**more, peft=str(tmp_path / "adapter")), examples(inputs)
    assert torch.equal(again.eval()(x), network.eval()(x))
    assert {name for name, value in again.named_parameters() if value.requires_grad} == trained


@pytest.mark.slow
@in_one_test(
    ("known", "peft"),
    [
        (13, {"peft_type": "LORA", "r": 2, "target_modules": ["lm_head"], "trainable_token_indices": [5, 6]}),
        (11, {"peft_type": "LORA", "r": 2, "target_modules": ["embed_tokens", "lm_head"]}),
        (
            11,
            {"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
        ),
        (13, {"peft_type": "CPT", "cpt_token_ids": [5, 6]}),
        (13, {"peft_type": "VERA", "r": 2, "target_modules": ["q_proj"]}),
    ],
)
def test_saved_adapters_have_the_numbers_of_the_tokenizer(
    known: int, peft: Any, folders: dict[str, Any], tmp_path: Path
) -> None:
    """peft computes with the saved network, and its tokens, what was computed here, where tokens are 3 larger.

    It has 13 tokens, of which the tokenizer may lack some.
    """
    import peft as library

    name = f"transformers:{folders['place']}/llama"
    pairs, x = SequenceShape(8, known + 3, "bpe", known + 3, True), examples(NEXT)
    x[:, 2:4] = torch.tensor([5, 6])
    network = built(name, pairs, peft=peft)
    for parameter in network.parameters():
        if parameter.requires_grad:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    model_settings({"name": name, "peft": peft}).save(lambda: network, tmp_path)
    theirs = library.PeftModel.from_pretrained(copy.deepcopy(folders["llama"]), str(tmp_path / "adapter"))
    here, there = network.eval()(x + 3), theirs.eval()(x, attention_mask=torch.ones_like(x)).logits[:, -8:]
    assert torch.allclose(there[..., 3:known], here[..., 6:], atol=1e-5)
    assert torch.allclose(there[..., 2], here[..., 2], atol=1e-5)  # the end of a text has been trained as 2
    again = built(name, pairs, peft=str(tmp_path / "adapter"))
    assert torch.allclose(again.eval()(x + 3)[..., 6:], here[..., 6:], atol=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed (fedpriv[zoo])")
def test_adapters_of_experts_have_gradients_of_single_examples() -> None:
    """peft puts the experts' weights aside while they run, and back behind the others; autograd, one text at a time."""
    keys = {"peft_type": "LORA", "r": 2, "target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj"]}
    config = {**SMALL, "num_hidden_layers": 1, "num_key_value_heads": 1, "num_local_experts": 3}
    network, x = built("transformers:mixtral", NEXT, config=config, peft=keys), examples(NEXT)
    for value in network.parameters():
        value.data += 0.1 * torch.randn(value.shape, generator=torch.Generator().manual_seed(1))
    labels, trained = x.roll(-1, dims=1), {n: value for n, value in network.named_parameters() if value.requires_grad}
    refuse_mixed_examples(network, example_losses, x, labels)
    found = per_example_gradients(network, example_losses, x, labels)
    for row in range(len(x)):
        loss = example_losses(network(x[row : row + 1]), labels[row : row + 1]).sum()
        alone = torch.autograd.grad(loss, list(trained.values()))
        ours = found.combine(torch.eye(len(x))[row])
        assert all(torch.allclose(ours[n], one, atol=1e-6) for n, one in zip(trained, alone, strict=True))
        assert any(bool(one.any()) for one in alone)


@pytest.mark.slow
def test_adapters_with_an_encoder_are_no_start(folders: dict[str, Any], tmp_path: Path) -> None:
    name, keys = f"transformers:{folders['place']}/llama", {"peft_type": "P_TUNING", "num_virtual_tokens": 2}
    model_settings({"name": name, "peft": keys}).save(lambda: built(name, NEXT, peft=keys), tmp_path)
    with pytest.raises(InputError, match="no P_TUNING with an encoder"):
        built(name, NEXT, peft=str(tmp_path / "adapter"))


@pytest.mark.slow
def test_running_statistics_of_frozen_layers_are_saved_with_adapters(tmp_path: Path) -> None:
    library = pytest.importorskip("peft", reason="peft is not installed (fedpriv[zoo])")
    keys = {"peft_type": "LORA", "r": 2, "target_modules": ["0"]}
    network = built(f"{__name__}:small", peft=keys)
    network.train()(examples(IMAGES))
    model_settings({"name": f"{__name__}:small", "peft": keys}).save(lambda: network, tmp_path)
    again = built(f"{__name__}:small", peft=str(tmp_path / "adapter"))
    theirs = library.PeftModel.from_pretrained(built(f"{__name__}:small"), str(tmp_path / "adapter"))
    for loaded in (again, theirs):
        assert torch.equal(loaded.eval()(examples(IMAGES)), network.eval()(examples(IMAGES)))


@pytest.mark.slow
@in_one_test(
    ("keys", "words"),
    [
        ({"peft": {"peft_type": "LORAA"}}, "peft_type = 'LORAA'.*did you mean LORA"),
        ({"peft": {"peft_type": "LORA", "rank": 2}}, "LORA has no key rank; did you mean"),
        ({"peft": {"peft_type": "LORA", "init_lora_weights": "pissa_niter_4"}}, "init_lora_weights = 'pissa_niter_4'"),
        ({"peft": {"peft_type": "LORA", "target_modules": ["query"]}}, "= .*query.*: matches no layer.*q_proj"),
        ({"peft": {"peft_type": "LORA", "use_dora": True, "target_modules": ["lm_head"]}}, "tokenizer lacks 2 of the"),
        ({"peft": "nowhere"}, "peft = 'nowhere': a folder with adapter_model.safetensors"),
        ({"config": {"hiden_size": 8}}, "has no key hiden_size; did you mean hidden_size"),
    ],
)  # fmt: skip
def test_keys_that_do_not_fit_a_folder_are_told_in_one_line(keys: Any, words: str, folders: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=words) as told:
        built(f"transformers:{folders['place']}/llama", NEXT, **keys)
    assert "\n" not in str(told.value)
    with pytest.raises(InputError, match="llamma': no such folder"):
        built(f"transformers:{folders['place']}/llamma", NEXT)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weights")


@in_one_test(
    ("name", "inputs", "more", "words"),
    [
        ("torchvision:resnet81", IMAGES, {}, "no such network; did you mean resnet18 or"),
        ("torchvision:squeezenet1_1", NEXT, {}, "of torchvision take images, and the data are texts"),
        ("torchvision:squeezenet1_1", IMAGES, {"version": "0.1"}, "version = '0.1': torchvision .* is installed"),
        ("torchvision:squeezenet1_1", IMAGES, {"arguments": {"dropuot": 0}}, "unexpected keyword argument 'dropuot'"),
        (
            "torchvision:squeezenet1_1",
            IMAGES,
            {"arguments": {"weights": "DEFAULT"}},
            "weights = 'DEFAULT': nothing is fetched",
        ),
        ("torchvision:squeezenet1_1", (3, 16, 16), {}, "does not take images of 16x16, and takes 20x20"),
        ("torchvision:squeezenet1_1", IMAGES, {"freeze": ["features.0"]}, "freeze = 'features.0'.*features.0.\\*"),
        (
            "torchvision:squeezenet1_1",
            IMAGES,
            {"pretrained": "small"},
            "is of another network: lacks features.0.weight",
        ),
        (
            f"{__name__}:small",
            IMAGES,
            {"pretrained": "wide"},
            "0.weight has shape .5, 3, 3, 3., and in the network .4, 3",
        ),
        (f"{__name__}:small", IMAGES, {"pretrained": "whole"}, "is no file of torch with numbers alone"),
        (f"{__name__}:small", IMAGES, {"pretrained": "nowhere"}, "cannot be read: No such file"),
    ],
)
def test_what_does_not_fit_is_told_in_one_line(name: str, inputs: Any, more: Any, words: str, place: Path) -> None:
    if "pretrained" in more:
        torch.save(small(IMAGES, 5).state_dict(), place / "small.pt")
        torch.save(small(IMAGES, 5, 5).state_dict(), place / "wide.pt")
        torch.save(small(IMAGES, 5), place / "whole.pt")
        more = {"pretrained": str(place / f"{more['pretrained']}.pt")}
    with pytest.raises(InputError, match=words) as told:
        built(name, inputs, **more)
    assert "\n" not in str(told.value)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed (fedpriv[zoo])")
def test_what_does_not_fit_into_memory_is_not_built() -> None:
    with pytest.raises(InputError, match=r"8796\.2 billion parameters and their gradient take 65537 GiB"):
        built("transformers:llama", NEXT, config={**SMALL, "hidden_size": 2**20})


@in_one_test(("library", "missing"), [("timm", "timm"), ("transformers", "transformers"), ("torchvision", "peft")])
def test_a_library_that_is_not_installed_has_an_extra(library: str, missing: str) -> None:
    def absent(name: str) -> str:
        if name == missing:
            raise PackageNotFoundError(name)
        return "1.0"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedpriv.models.libraries.version", absent)
        with pytest.raises(InputError, match=rf"needs {missing}: pip install 'fedpriv\[zoo\]'"):
            built(f"{library}:resnet18", peft={"peft_type": "LORA"})


@pytest.mark.slow
def test_a_run_says_what_was_changed_and_saves_adapters(tmp_path: Path) -> None:
    """Its configuration builds the network again, for the attack and for another run."""
    peft = pytest.importorskip("peft", reason="peft is not installed (fedpriv[zoo])")
    adapters = {"peft_type": "LORA", "r": 2, "target_modules": r".*\.(q_proj|query)"}
    model = {"name": "transformers:vit", "config": {**SMALL, "patch_size": 4}, "peft": adapters, "freeze": ["*lora_A*"]}
    settings = experiment(model=model, adversary={"attacks": ["iga"], "victims": 1, "iga": {"iterations": 2}})
    summary = start_run(settings, tmp_path / "run", "", Silent())
    assert summary.model.notes == ("frozen: *lora_A*", "adapters of peft: LORA")
    assert "iga" in {result.attack for result in summary.attacks}
    folder = RunFolder.open(tmp_path / "run")
    assert folder.experiment().model == settings.model
    assert ("model.peft.r", 2) in [(key, value) for key, value, _, _ in describe(settings)]
    saved = load_file(tmp_path / "run/checkpoint/adapter/adapter_model.safetensors")
    trained = folder.load_checkpoint().tensors  # type: ignore[union-attr]
    ends = {"lora_B.weight": "lora_B.default.weight", "classifier.bias": "classifier.modules_to_save.default.bias"}
    for end, here in ends.items():
        (value,), (own,) = (
            [each for name, each in held.items() if name.endswith(last)][:1]
            for held, last in ((saved, end), (trained, here))
        )
        assert torch.equal(value, own)
    assert peft.PeftConfig.from_pretrained(str(tmp_path / "run/checkpoint/adapter")).r == 2
