"""Searches for sentences: gradients and likelihoods against autograd, tokens read off tables, texts recovered."""

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedpriv.attacks.campaign import Campaign, attack_each
from fedpriv.attacks.observation import Observation, PublicSettings
from fedpriv.attacks.reconstruction import AttackJob, AttackRefused
from fedpriv.attacks.reconstruction.dummy_gradients.network import twice_differentiable
from fedpriv.attacks.reconstruction.labels import made_together
from fedpriv.attacks.reconstruction.matching import Objective, angle, squared_distance
from fedpriv.attacks.reconstruction.posterior import misfit
from fedpriv.attacks.reconstruction.scene import ENDED
from fedpriv.attacks.reconstruction.upload_model import Victim, prepare_victims
from fedpriv.attacks.referee import bare
from fedpriv.attacks.texts.lookup import read_lookup
from fedpriv.attacks.texts.scene import TextScene
from fedpriv.attacks.texts.scoring import (
    Language,
    Scorer,
    Texts,
    soft_batch,
    split,
    squared_and_absolute,
    tensor_angle,
    trained_network,
)
from fedpriv.attacks.texts.search import Ground, Vectors, crossed, rearranged, reordered, replaced, shortened
from fedpriv.attacks.texts.soft import soft_network, table_name, token_tables
from fedpriv.core.federated import example_losses
from fedpriv.core.randomness import Secret
from fedpriv.core.registry import ATTACKS
from fedpriv.gradients import per_example_gradients
from fedpriv.mechanisms import mechanism_settings
from fedpriv.models.machinery.adapters import with_lora
from fedpriv.models.machinery.llama import Llama, _Sizes
from fedpriv.models.machinery.transformer import Encoder, Gpt
from fedpriv.models.texts import GptSettings
from tests.attacks.text_uploads import (
    LENGTH,
    PACKED,
    VOCABULARY,
    following,
    gradient,
    observed,
    packed,
    public_settings,
    sentences,
)
from tests.cases import in_one_test

WIDTH = 32
PUBLIC = sentences(60, seed=9)


def network(kind: str, classes: int | None = 2) -> nn.Module:
    torch.manual_seed(1)
    if kind == "encoder":
        return Encoder(VOCABULARY, LENGTH, WIDTH, 1, 4, 2)
    if kind == "llama":
        model = Llama(_Sizes(WIDTH, 64, 1, 4, 2, VOCABULARY, LENGTH))
        if classes is not None:
            model.classify(classes)
        return model
    model = Gpt(VOCABULARY, LENGTH, WIDTH, 1, 4, classes)
    if kind == "lora":
        return with_lora(model, GptSettings(lora_rank=4), ("query", "value", "up"), "output")
    return model


def scene_of(model: nn.Module, heard: Observation) -> tuple[TextScene, Victim]:
    settings = heard.settings
    assert settings.text is not None
    scene = TextScene.of(model, settings.shape, settings.classes, settings.text, PUBLIC[:, None, None])
    (victim,) = prepare_victims([heard], scene.names, scene.device)
    return scene, victim


def released(model: nn.Module, tokens: Tensor, labels: Tensor, **mechanism: Any) -> Observation:
    """A batch's upload through a mechanism, and what is public of it."""
    settings = mechanism_settings(mechanism)
    gradients = per_example_gradients(model, example_losses, tokens, labels)
    noise = Secret.of_seed(1).stream("noise", 1)
    if settings.unit == "update":
        gradients = per_example_gradients(
            model, lambda outputs, y: example_losses(outputs.flatten(0, 0), y).mean()[None], tokens, labels
        )
    upload = settings.mechanism(None).release(gradients, len(tokens), noise)
    recorded = settings.model_dump(mode="json", exclude_none=True)
    return observed(
        model, {name: value.detach() for name, value in upload.items()},
        public_settings(len(tokens), "classify", mechanism=recorded),
    )  # fmt: skip


def attacked(attack: str, model: nn.Module, heard: Observation, **config: Any) -> Campaign:
    return attack_each(
        AttackJob(attack, [heard], model, ATTACKS[attack](**config), 0, public_images=PUBLIC[:, None, None])
    )


def read(campaign: Campaign) -> list[list[int]]:
    assert not campaign.failures, campaign.failures
    return sorted(bare(tokens) for tokens in campaign.found[0].images)


def true(tokens: Tensor) -> list[list[int]]:
    return sorted(map(bare, tokens))


# ---- gradients ------------------------------------------------------------------------------------------------------


@in_one_test(
    ("kind", "classes"), [("gpt", 2), ("gpt", None), ("encoder", 2), ("llama", 2), ("llama", None), ("lora", 2)]
)
def test_probabilities_of_one_have_the_gradients_of_their_tokens(kind: str, classes: int | None) -> None:
    model, tokens = network(kind, classes), sentences(3)
    longer = F.pad(tokens, (0, 1)) if classes is None else tokens
    labels = torch.tensor([1, 0, 1])
    scene, victim = scene_of(
        model,
        observed(
            model,
            gradient(model, tokens, labels if classes else tokens),
            public_settings(3, "next" if classes is None else "classify"),
        ),
    )
    given, targets = split(scene, longer, labels)
    soft = soft_network(trained_network(scene, victim), VOCABULARY, "probabilities")
    batch = soft_batch(scene, F.one_hot(longer, VOCABULARY).float()[None], labels[None])
    with twice_differentiable():
        made = soft.gradients(victim.parameters, *batch, shared=True, each=False)
    for name, value in gradient(model, given, targets).items():
        torch.testing.assert_close(made[name][0], value, rtol=1e-3, atol=1e-6)


@in_one_test("kind", ["gpt", "encoder", "llama"])
def test_vectors_of_tokens_match_to_zero_and_others_do_not(kind: str) -> None:
    model, tokens, labels = network(kind), sentences(1), torch.tensor([1])
    scene, victim = scene_of(model, observed(model, gradient(model, tokens, labels), public_settings(1, "classify")))
    ground = replace(Ground.of(scene, victim), lengths=(LENGTH,))
    with twice_differentiable():
        vectors = Vectors(ground, squared_distance, None, torch.Generator().manual_seed(1))
        there = ground.table[tokens]
        at_truth, elsewhere = vectors.losses(torch.stack([there, vectors.now])).tolist()
    assert abs(at_truth) < 1e-3 * elsewhere
    assert vectors.texts(there).tokens.tolist() == tokens.tolist()


def angles(expected: dict[str, Tensor], heard: dict[str, Tensor]) -> float:
    cosines = [
        float(torch.dot(value.flatten(), heard[name].flatten()) / value.norm() / heard[name].norm())
        for name, value in expected.items()
        if float(heard[name].norm()) > 1e-6  # a bias of keys has no gradient but rounding
    ]
    return 1 - sum(cosines) / len(cosines)


def distances(expected: dict[str, Tensor], heard: dict[str, Tensor]) -> float:
    weights = torch.linspace(1, 0, len(expected)).tolist()
    apart = [expected[name] - heard[name] for name in expected]
    return sum(float(one.square().sum() + 0.5 * w * one.abs().sum()) for w, one in zip(weights, apart, strict=True))


def one_angle(expected: dict[str, Tensor], heard: dict[str, Tensor]) -> float:
    ours, theirs = (torch.cat([vector[name].flatten() for name in expected]) for vector in (expected, heard))
    return 1 - float(torch.dot(ours, theirs) / ours.norm() / theirs.norm())


@pytest.mark.parametrize(
    ("objective", "by_hand"),
    [(tensor_angle, angles), (angle, one_angle), (squared_and_absolute(0.5), distances)],
    ids=["angles", "angle", "distance"],
)
def test_mismatches_are_those_of_gradients_one_tensor_at_a_time(
    objective: Objective, by_hand: Callable[[dict[str, Tensor], dict[str, Tensor]], float]
) -> None:
    model, tokens, label = network("encoder"), sentences(2)[:1], torch.tensor([1])
    heard = gradient(model, sentences(1, seed=4), label)
    scene, victim = scene_of(model, observed(model, heard, public_settings(1, "classify")))
    ground = replace(Ground.of(scene, victim), lengths=(LENGTH,), labels=label)
    with twice_differentiable():
        vectors = Vectors(ground, objective, None, torch.Generator().manual_seed(1))
        found = vectors.losses(ground.table[tokens].expand(5, 1, -1, -1)).tolist()
    trained = {name: value for name, value in gradient(model, tokens, label).items() if name in ground.bare.gradient}
    assert found == pytest.approx([by_hand(trained, heard)] * 5, rel=1e-3)


# ---- scores ---------------------------------------------------------------------------------------------------------


def expected(model: nn.Module, tokens: Tensor, labels: Tensor, settings: PublicSettings) -> Tensor:
    """What a batch is expected to send, by autograd, one example at a time, and the mechanism's own formula: (K,)."""
    config = mechanism_settings(settings.mechanism)
    mechanism = config.mechanism(None)
    each = [gradient(model, tokens[[row]], labels[[row]]) for row in range(len(tokens))]
    if config.unit == "update":
        each = [{name: torch.stack([one[name] for one in each]).mean(dim=0) for name in each[0]}]
    sent = [mechanism.expected(one) for one in each] if mechanism.protects else each
    return torch.cat([torch.stack([one[name] for one in sent]).mean(dim=0).flatten() for name in each[0]]).double()


MECHANISMS = [
    {"name": "none"},
    {"name": "gaussian", "sigma": 0.02},
    {"name": "gaussian", "sigma": 0.02, "unit": "update"},
    {"name": "vmf", "kappa": 1e5},
    {"name": "laplace", "scale": 0.01, "clip_norm": 30.0},
]


@pytest.mark.parametrize(("batch", "slots"), [(1, (0,)), (3, (1,)), (3, (0, 2))])
@in_one_test("mechanism", MECHANISMS)
def test_scores_are_the_likelihood_of_gradients_that_are_written_out(
    mechanism: dict[str, Any], batch: int, slots: tuple[int, ...]
) -> None:
    model, tokens, labels = network("gpt"), sentences(batch), torch.arange(batch) % 2
    heard = released(model, tokens, labels, **{key: value for key, value in mechanism.items() if key != "unit"})
    heard = observed(
        model,
        dict(heard.upload),
        public_settings(
            batch, "classify", mechanism=mechanism_settings(mechanism).model_dump(mode="json", exclude_none=True)
        ),
    )
    scene, victim = scene_of(model, heard)
    others, classes = (
        sentences(12, seed=5)[: 2 * len(slots)].unflatten(0, (2, -1)),
        torch.ones(2, len(slots), dtype=torch.int64),
    )
    texts = Texts(tokens, labels)
    with twice_differentiable():
        soft = soft_network(trained_network(scene, victim), VOCABULARY, "probabilities")
        scores = Scorer(scene, victim, soft, misfit).exchanged(texts, slots, others, classes)
    wanted = []
    upload = torch.cat([value.flatten() for value in victim.gradient.values()])[None]
    for sentence, label in zip(others, classes, strict=True):
        made = texts.exchanged(slots, sentence, label)
        sent = expected(model, made.tokens, made.labels, heard.settings)[None]
        wanted.append(victim.noise.misfit(sent, upload.double()))
    torch.testing.assert_close(scores.double(), torch.cat(wanted).double(), rtol=2e-3, atol=0.05)


def test_scores_of_several_local_steps_are_zero_at_the_sentences_that_were_trained_on() -> None:
    model, tokens, labels = network("gpt"), sentences(2), torch.tensor([0, 1])
    trained = network("gpt")
    trained.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    for row in (0, 1):  # one sentence a step
        optimizer.zero_grad()
        example_losses(trained(tokens[[row]]), labels[[row]]).mean().backward()
        optimizer.step()
    change = {
        name: (value - dict(model.named_parameters())[name]).detach() for name, value in trained.named_parameters()
    }
    settings = public_settings(1, "classify", algorithm="fedavg", local_steps=2)
    scene, victim = scene_of(model, observed(model, change, settings))
    with twice_differentiable():
        soft = soft_network(trained_network(scene, victim), VOCABULARY, "probabilities")
        scorer = Scorer(scene, victim, soft, squared_distance)
        there, other = scorer.loss(Texts(tokens, labels)), scorer.loss(Texts(sentences(2, seed=3), labels))
    assert abs(there) < 1e-3 * other


# ---- tables, labels, language ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gpt", "encoder"])
def test_tables_tell_one_sentence_in_order_repeated_tokens_included(kind: str) -> None:
    model, tokens, labels = network(kind), sentences(1), torch.tensor([1])
    tokens[0, 5] = tokens[0, 2]
    heard = observed(model, gradient(model, tokens, labels), public_settings(1, "classify"))
    assert read(attacked("lookup", model, heard)) == true(tokens)


@in_one_test("kind", ["gpt", "encoder", "llama"])
def test_tables_tell_which_tokens_a_batch_has(kind: str) -> None:
    model, tokens, labels = network(kind), sentences(4), torch.arange(4) % 2
    heard = observed(model, gradient(model, tokens, labels), public_settings(4, "classify"))
    assert set(read_lookup(*scene_of(model, heard)).tokens.tolist()) == {token for row in tokens for token in bare(row)}


@in_one_test("batch", [1, 2, 3])
def test_a_table_that_is_the_last_layer_too_tells_what_was_looked_up(batch: int) -> None:
    torch.manual_seed(1)
    model, (inputs, targets) = Gpt(VOCABULARY, LENGTH, 64, 2, 4, None), following(sentences(batch))
    heard = observed(model, gradient(model, inputs, targets), public_settings(batch, "next"))
    found = read_lookup(*scene_of(model, heard)).tokens
    assert set(found.tolist()) == {token for row in inputs for token in bare(row)}
    if batch == 1:
        assert read(attacked("lookup", model, heard)) == true(inputs)


def test_states_that_fill_the_table_hide_what_was_looked_up() -> None:
    model, (inputs, targets) = network("gpt", None), following(sentences(3))
    heard = observed(model, gradient(model, inputs, targets), public_settings(3, "next"))
    assert "which tokens were looked up does not stand out" in attacked("lookup", model, heard).failures[0]


@pytest.mark.parametrize("kind", ["gpt", "encoder", "llama", "lora"])
def test_labels_are_counted(kind: str) -> None:
    model, tokens = network(kind), sentences(4)
    for labels in ([0, 0, 0, 1], [0, 0, 1, 1], [1, 1, 1, 1]):
        heard = observed(model, gradient(model, tokens, torch.tensor(labels)), public_settings(4, "classify"))
        with twice_differentiable():
            assert Counter(Ground.of(*scene_of(model, heard)).labels.tolist()) == Counter(labels)


def test_a_language_model_adds_up_chances_and_learns_what_is_usual() -> None:
    tokens = torch.tensor([[1, 7, 8, 9, 0]])
    model = network("gpt")
    scene, _ = scene_of(
        model, observed(model, gradient(model, sentences(1), torch.tensor([1])), public_settings(1, "classify"))
    )
    usual = TextScene(scene.model, scene.names, scene.format, 5, 2, tokens.repeat(100, 1))
    language = Language.of(usual, "")
    chances = language.chances(tokens[:, :3])[0]
    torch.testing.assert_close(chances.exp().sum(dim=1), torch.ones(3))
    by_hand = -sum(float(chances[place, token]) for place, token in enumerate([7, 8, 9]))
    assert float(language.surprise(tokens)) == pytest.approx(by_hand, rel=1e-5)
    assert float(language.surprise(tokens)) < float(language.surprise(torch.tensor([[1, 9, 8, 7, 0]]))) - 3


# ---- changes --------------------------------------------------------------------------------------------------------


def test_sentences_are_rearranged_in_every_way() -> None:
    sentence = torch.tensor([1, 5, 6, 7, 0])
    made = {tuple(row) for row in rearranged(sentence, 1).tolist()}
    orders = {(1, *order, 0) for order in itertools.permutations((5, 6, 7))} - {(1, 5, 6, 7, 0)}
    shorter = {(1, 6, 7, 0, 0), (1, 5, 7, 0, 0), (1, 5, 6, 0, 0)}
    longer = {(1, 5, 5, 6, 7), (1, 5, 6, 6, 7), (1, 5, 6, 7, 7)}
    assert made == orders | shorter | longer
    assert [row.tolist() for row in shortened(sentence)] == [[1, 5, 0, 0, 0], [1, 5, 6, 0, 0]]
    assert [row.tolist() for row in shortened(torch.tensor([1, 5, 0]))] == []
    turned = {tuple(row) for row in rearranged(torch.tensor([1, 4, 5, 6, 7, 8]), 1).tolist()}
    assert {(1, *[4, 5, 6, 7, 8][place:], *[4, 5, 6, 7, 8][:place]) for place in (1, 2, 3, 4)} <= turned
    swapped, moved = {(5, 1, 6, 7, 0), (6, 5, 1, 7, 0), (7, 5, 6, 1, 0)}, {(5, 6, 7, 1, 0), (7, 1, 5, 6, 0)}
    first = swapped | moved | {(5, 6, 7, 0, 0), (1, 1, 5, 6, 7)}
    assert {tuple(row) for row in rearranged(sentence, 0).tolist()} > made | first


def test_sentences_exchange_tokens_without_losing_any() -> None:
    one, other = torch.tensor([1, 5, 6, 7]), torch.tensor([1, 8, 9, 0])
    made = crossed(one, other, 1)
    assert all(Counter(pair.flatten().tolist()) == Counter([1, 5, 6, 7, 1, 8, 9, 0]) for pair in made)
    assert not any(bool((row[:-1] == 0).logical_and(row[1:] != 0).any()) for pair in made for row in pair)
    assert len({str(pair.tolist()) for pair in made}) == len(made) > 3
    first = torch.tensor([[8, 5, 6, 7], [3, 8, 9, 0]])
    exchanged = torch.tensor([[3, 5, 6, 7], [8, 8, 9, 0]])
    assert any(torch.equal(pair, exchanged) for pair in crossed(*first, known=0))


def test_changes_are_joined_where_they_do_not_touch() -> None:
    sentence = torch.tensor([1, 2, 3, 4])
    better = torch.tensor([[1, 9, 3, 4], [1, 8, 3, 4], [1, 2, 3, 7]])
    assert made_together(sentence, better).tolist() == [[1, 9, 3, 4], [1, 9, 3, 7]]


def test_the_most_promising_tokens_are_tried() -> None:
    slopes = torch.tensor([[torch.inf] * 4, [0.0, -3.0, 1.0, torch.inf], [-1.0, 5.0, -2.0, 0.0]])
    assert replaced(torch.tensor([0, 3, 1]), slopes, 3, 2).tolist() == [[0, 1, 1], [0, 3, 2], [0, 3, 0]]


def test_orders_keep_vectors_and_beginnings() -> None:
    vectors = torch.arange(1.0, 13.0).view(2, 6, 1)
    stream = torch.Generator().manual_seed(1)
    for _ in range(50):
        made = reordered(vectors, [6, 4], stream)
        assert made[:, 0].tolist() == vectors[:, 0].tolist() and made[1, 4:].tolist() == vectors[1, 4:].tolist()
        assert made.sort(dim=1).values.tolist() == vectors.tolist()


# ---- whole attacks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "kicks", "mechanism"),
    [
        ("gpt", 3, {"name": "gaussian", "sigma": 0.01}),
        ("encoder", 1, {"name": "none"}),
        ("llama", 1, {"name": "vmf", "kappa": 1e5}),
    ],
    ids=["gpt-gaussian", "encoder-none", "llama-vmf"],
)
def test_the_most_probable_sentence_is_the_true_one(kind: str, kicks: int, mechanism: dict[str, Any]) -> None:
    model, tokens, labels = network(kind), sentences(1, seed=1), torch.tensor([1])
    campaign = attacked("text_map", model, released(model, tokens, labels, **mechanism), kicks=kicks)
    assert read(campaign) == true(tokens)
    assert campaign.found[0].labels.tolist() == [1] and "GPT" in campaign.found[0].note


def test_the_length_is_found_behind_noise_that_hides_it() -> None:
    """A search that begins with as many tokens as there is room for fits them to the noise."""
    torch.manual_seed(1)
    model, tokens, labels = Gpt(VOCABULARY, LENGTH, 128, 2, 4, 2), sentences(1), torch.tensor([1])
    tokens[0, 4:] = 0
    heard = released(model, tokens, labels, name="gaussian", sigma=0.015)
    assert read_lookup(*scene_of(model, heard)).length is None
    assert read(attacked("text_map", model, heard, kicks=0)) == true(tokens)


@pytest.mark.parametrize(("kind", "attack"), [("gpt", "lookup"), ("gpt", "text_map")])
def test_packed_sequences_are_searched_from_their_first_token(kind: str, attack: str) -> None:
    model, (inputs, targets) = network(kind, None), packed(1)
    heard = observed(model, gradient(model, inputs, targets), public_settings(1, "next", text=PACKED))
    campaign = attacked(attack, model, heard)
    assert campaign.found[0].images[0].flatten().tolist() == inputs[0].tolist()


@pytest.mark.parametrize(("attack", "least"), [("lamp", 6), ("tag", 3)])
def test_vectors_lead_to_tokens_of_the_sentence(attack: str, least: int) -> None:
    model, tokens, labels = network("gpt"), sentences(1), torch.tensor([1])
    heard = observed(model, gradient(model, tokens, labels), public_settings(1, "classify"))
    (found,) = read(attacked(attack, model, heard, iterations=80))
    # Of nine tokens, out of 200; three by chance have a probability below 0.01.
    assert (Counter(found) & Counter(bare(tokens[0]))).total() >= least


@in_one_test("attack", ["lookup", "tag", "lamp", "text_map", "dager"])
def test_spare_rows_of_the_table_change_nothing(attack: str) -> None:
    """As of most networks in use, whose tables end at a multiple of 64."""
    read_of = []
    for rows in (VOCABULARY, 256):
        model, (tokens, labels) = network("encoder" if attack == "dager" else "gpt"), (sentences(1), torch.tensor([1]))
        (name,) = token_tables(model, VOCABULARY)
        spare = torch.randn(rows - VOCABULARY, model.get_submodule(name).embedding_dim)
        model.set_submodule(
            name, nn.Embedding.from_pretrained(torch.cat([model.get_parameter(f"{name}.weight"), spare]))
        )
        model.requires_grad_()
        heard = observed(model, gradient(model, tokens, labels), public_settings(1, "classify"))
        few = {key: 5 for key in ("iterations", "kicks") if key in ATTACKS[attack].model_fields}
        read_of.append(read(attacked(attack, model, heard, **few)))
    assert read_of[0] == read_of[1] and read_of[0][0]


def test_labels_that_are_known_stay() -> None:
    model = network("gpt")
    heard = observed(model, gradient(model, sentences(1), torch.tensor([1])), public_settings(1, "classify"))
    campaign = attacked("text_map", model, replace(heard, labels=(0,)), iterations=2, kicks=0)
    assert campaign.found[0].labels.tolist() == [0]


def test_what_cannot_be_searched_is_refused() -> None:
    model, (inputs, targets) = network("gpt", None), following(sentences(1))
    heard = observed(model, gradient(model, inputs, targets), public_settings(1, "next"))
    for attack in ("tag", "lamp"):
        assert "next token is predicted; text_map, dager and lookup read" in attacked(attack, model, heard).failures[0]
    gpt = network("gpt")
    update = mechanism_settings({"name": "gaussian", "sigma": 0.1, "unit": "update"})
    settings = public_settings(2, "classify", mechanism=update.model_dump(mode="json", exclude_none=True))
    heard = observed(gpt, gradient(gpt, sentences(2), torch.tensor([0, 1])), settings)
    for attack in ("tag", "lamp"):
        assert "does not tell them" in attacked(attack, gpt, heard).failures[0]
    lora = network("lora")
    heard = observed(lora, gradient(lora, sentences(1), torch.tensor([1])), public_settings(1, "classify"))
    assert "frozen" in attacked("lookup", lora, heard).failures[0]
    with pytest.raises(AttackRefused, match="0 embeddings"):
        table_name(nn.Linear(3, 3), VOCABULARY)
    with pytest.raises(AttackRefused, match="rows of its gradient that are not zero still tell which tokens occur"):
        table_name(nn.Sequential(nn.EmbeddingBag(9, 4)), 9)


@pytest.mark.parametrize("public", [None, PUBLIC[:9, None, None]])
def test_without_public_texts_a_sentence_is_read_off_tables(public: Tensor | None) -> None:
    """And with too few of them, as a small file of one's own has."""
    model, tokens = network("gpt"), sentences(1)
    heard = observed(model, gradient(model, tokens, torch.tensor([1])), public_settings(1, "classify"))
    campaign = attack_each(AttackJob("lookup", [heard], model, ATTACKS["lookup"](), 0, public_images=public))
    assert read(campaign) == true(tokens) and "without 10 public texts" in campaign.found[0].note


@pytest.mark.parametrize("attack", ["tag", "lamp", "text_map", "dager"])
def test_when_time_is_up_the_best_so_far_is_kept(attack: str) -> None:
    model = network("encoder" if attack == "dager" else "gpt")
    heard = observed(model, gradient(model, sentences(1), torch.tensor([1])), public_settings(1, "classify"))
    (long,) = ({"iterations", "starts"} & {*ATTACKS[attack].model_fields},)
    config = ATTACKS[attack](**dict.fromkeys(long, 10**7))
    job = AttackJob(attack, [heard], model, config, 0, seconds=1e-9)
    campaign = attack_each(job)
    assert campaign.found[0].images.shape == (1, 1, 1, LENGTH) and ENDED in campaign.found[0].note


@pytest.mark.parametrize("attack", ["tag", "lamp"])
def test_progress_counts_all_uploads_and_restarts_once(attack: str) -> None:
    """What a listener extrapolates from never starts over."""
    model, heard_of = network("gpt"), []
    heard = observed(model, gradient(model, sentences(1), torch.tensor([1])), public_settings(1, "classify"))
    job = AttackJob(attack, [heard] * 2, model, ATTACKS[attack](iterations=2, restarts=2), 0)
    attack_each(replace(job, progress=lambda *each: heard_of.append(each[:2])))
    assert heard_of == [(done, 8) for done in range(1, 9)]
    heard_of.clear()
    refused = replace(heard, settings=replace(heard.settings, text=None))
    attack_each(replace(job, observations=[refused, heard], progress=lambda *each: heard_of.append(each[:2])))
    assert heard_of == [(done, 8) for done in range(5, 9)]
