"""The shadow attack by whoever has none of the target's data: shadows are trained on data made in three ways."""

from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field
from typing_extensions import override

from fedpriv.attacks.probing import ModelAttack, ProbeOutcome
from fedpriv.core.registry import PROBES
from fedpriv.core.settings import Count, Real

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from fedpriv.attacks.membership.answers import Told
    from fedpriv.attacks.questions import Questions
    from fedpriv.attacks.scene import ProbeReferee, ProbeScene, Public, Rehearsal

_SEARCH, _STATISTICS = "records that the model is sure of", "features drawn one by one"
_NOISY = "public records with noise"
_FEWEST = 20


@PROBES.register
class MembershipBySynthesis(ModelAttack):
    """Shadows of the run's own training; half of the questions make data, the others are about candidates."""

    name: ClassVar[str] = "membership-synthetic"
    title: ClassVar[str] = "Membership by shadows on made data"
    reference: ClassVar[str] = (
        "Shokri, Stronati, Song and Shmatikov: Membership Inference Attacks against Machine Learning Models, 2017"
    )

    references: Count = Field(8, description="shadow models")
    pairs: Count = Field(500, description="of a member and a non-member, at most")
    records: Count = Field(400, description="made records, at most")
    noise: Annotated[Real, Field(ge=0, le=1)] = Field(
        0.1, description="share of flipped binary features, or deviation, of public records"
    )

    @override
    def refusal(self, scene: "ProbeScene") -> str | None:
        from fedpriv.attacks.membership.answers import need_network

        return need_network(scene.known_training().rule, self.name)

    @override
    def run(self, scene: "ProbeScene", referee: "ProbeReferee") -> tuple[ProbeOutcome, ...]:
        ways = (_SEARCH,) if scene.public is None else (_SEARCH, _STATISTICS, _NOISY)
        return tuple(self._by(way, number, scene) for number, way in enumerate(ways))

    def _by(self, way: str, number: int, scene: "ProbeScene") -> ProbeOutcome:
        import numpy as np

        from fedpriv.attacks.membership.answers import ask_rows, membership_figures, told_words
        from fedpriv.attacks.membership.attacks import judged, predictions
        from fedpriv.attacks.pairs import draw_game, pairs_within
        from fedpriv.core.randomness import numpy_stream

        rehearsal, endpoint = scene.known_training(), scene.open()
        game = draw_game(rehearsal, pairs_within(scene.budget // 2, self.pairs), scene.seed)
        left = scene.budget - len(game.candidates.rows)
        generator = numpy_stream(scene.seed, "probe-synthesis", number)
        made = self._made(way, scene, endpoint, left, generator)
        asked = endpoint.asked
        if len(made.labels) < _FEWEST:
            sentence = f"{asked} questions made {len(made.labels)} records: too few to train shadows on; ask more."
            return self.outcome(asked, (), sentence, variant=way)
        told, inside = _shadows(rehearsal, made, self.references, generator)
        target = ask_rows(endpoint, game, game.candidates.rows)
        records = np.stack([predictions(answer.logits, answer.others) for answer in told])
        scores = judged(records, inside, predictions(target.logits, target.others))
        figures = membership_figures({"shadow models": scores}, game.candidates.truth, scene.proven, scene.seed)
        sentence = (
            f"{asked} questions made data ({len(made.labels)} records), {endpoint.asked - asked} were about candidates"
            f": {told_words(len(game.candidates.members), figures[0])}"
        )
        return self.outcome(endpoint.asked, figures, sentence, variant=way)

    def _made(
        self, way: str, scene: "ProbeScene", endpoint: "Questions", left: int, generator: "np.random.Generator"
    ) -> "Public":
        from fedpriv.attacks.membership.synthesis import by_model, by_statistics, is_binary, noisy_real

        count = min(self.records, left)
        if way == _SEARCH:
            binary = scene.public is not None and is_binary(scene.public.images)
            return by_model(endpoint, scene.shape, count, left, binary, generator)
        public = scene.known_public()
        if way == _STATISTICS:
            return by_statistics(public.images, endpoint, count, generator)
        return noisy_real(public.images[: self.records], public.labels[: self.records], self.noise, generator)


def _shadows(
    rehearsal: "Rehearsal", made: "Public", count: int, generator: "np.random.Generator"
) -> "tuple[list[Told], NDArray[np.bool_]]":
    """Train shadows, each on a half of the records; what each would say about all, and which it was trained with."""
    import numpy as np

    from fedpriv.attacks.membership.answers import reference_signals
    from fedpriv.attacks.references import Pool, Reference, train_references

    world, total = rehearsal.world, len(made.labels)
    images = world.dataset.normalise(made.images, next(iter(world.initial.parameters.values())).dtype)
    pool = Pool(images.to(world.device), made.labels.to(world.device))
    sizes = [len(rows) for rows in world.partitions]
    inside = np.stack([generator.permutation(total) < total // 2 for _ in range(count)])
    shares = []
    for half in inside:
        rows = np.flatnonzero(half)
        # As many as the run has: each record once, or as often as it takes.
        drawn = np.resize(generator.permutation(rows), sum(sizes))
        shares.append(tuple(np.split(drawn, np.cumsum(sizes)[:-1])))
    # With fewer places than records, only those that got one were trained with.
    inside = np.stack([np.isin(np.arange(total), np.concatenate(share)) for share in shares])
    seeds = generator.integers(2**31, size=count).tolist()
    drawn_references = [Reference(*each) for each in zip(seeds, shares, strict=True)]
    last = max(rehearsal.schedule)
    stack = train_references(world, pool, drawn_references, rehearsal.schedule, [last])[last]
    return reference_signals(rehearsal, rehearsal.rule, stack, pool, np.arange(total)), inside
