"""Tokens of one sequence, found in the noisy gradient of the pretrained Llama's first layer, compared with a guess.

Usage: python -m studies.sparse_tokens [--clients 8] [--length 16]

Each client uploads the gradient of one sequence of Shakespeare's text, clipped to 1. A token that was found counts if
it occurs in the sequence; the guess names as many tokens, those that are most frequent in public texts. Needs the
folder that FEDPRIV_DATA names.
"""

from fedpriv.attacks.reconstruction.upload_model import prepare_victims
from fedpriv.attacks.texts.dager import likely_tokens
from fedpriv.attacks.texts.scene import TextScene
from fedpriv.core.config import Experiment, validated
from fedpriv.core.names import PAD
from fedpriv.core.world import World, build_world
from studies.arguments import StudyParser, whole
from studies.uploads import FIRST, heard

NOISE = (("gaussian", "sigma", (0.001, 0.003, 0.01)), ("vmf", "kappa", (1e6, 1e5)))


def main() -> None:
    """Print one line for each mechanism and strength."""
    parser = StudyParser("studies.sparse_tokens", __doc__)
    parser.add_argument("--clients", type=whole(1), default=8)
    parser.add_argument("--length", type=whole(2), default=16)
    with parser.parsed() as options:
        for name, key, values in NOISE:
            for value in values:
                clip = {"clip_norm": 1.0} if name == "gaussian" else {}
                world = _world(options.clients, options.length, {"name": name, key: value, **clip})
                print(name, value, *_measured(world), flush=True)


def _measured(world: World) -> tuple[str, ...]:
    """Tokens that occur and were found, that occur, that were found and do not occur, and of the guess."""
    observations = heard(world)
    public = observations[0].settings
    if public.text is None:
        raise ValueError("the uploads are not of texts")
    scene = TextScene.of(world.model, public.shape, public.classes, public.text, None)
    frequent = world.dataset.x_test.flatten().long().bincount(minlength=public.text.vocabulary)
    frequent[PAD] = 0
    right = occurring = wrong = guessed = 0
    for victim in prepare_victims(observations, scene.names, scene.device):
        network = scene.with_parameters(victim.parameters)
        tokens = likely_tokens(scene, victim, network)
        found = set() if tokens is None else {*tokens.tolist()}
        rows = world.uploaded_rows(victim.client, FIRST)
        true = {*world.dataset.x_train[rows].flatten().long().tolist()} - {PAD}
        right, occurring, wrong = right + len(found & true), occurring + len(true), wrong + len(found - true)
        guessed += len({*frequent.topk(len(true)).indices.tolist()} & true)
    return f"found {right} of {occurring}", f"wrong {wrong}", f"guess {guessed}"


def _world(clients: int, length: int, mechanism: dict[str, object]) -> World:
    tree = {
        "seed": 1,
        "data": {
            "name": "shakespeare",
            "partition": "key",
            "text": {"tokenizer": "llama", "length": length, "pack": True, "tests": 512},
        },
        "model": {"name": "llama"},
        "federation": {"clients": clients, "rounds": 1},
        "training": {"batch_size": 1},
        "mechanism": mechanism,
        "adversary": {"victims": clients},
    }
    return build_world(validated(Experiment, tree, "these arguments"))


if __name__ == "__main__":
    main()
