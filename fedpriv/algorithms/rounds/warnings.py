"""Settings of rounds of uploads that have no effect, or mislead."""

from fedpriv.attacks.access import Access
from fedpriv.attacks.threat import threat_model
from fedpriv.core.budget import last_round
from fedpriv.core.config import Experiment
from fedpriv.core.settings import enumerated
from fedpriv.core.world import World
from fedpriv.server.crafting import check_crafting


def upload_warnings(world: World) -> tuple[str, ...]:
    """Return one line for each setting that has no effect or makes a result mean less than it seems to."""
    experiment = world.experiment
    check_crafting(world)
    return (
        *_unused(world),
        *_ignored_settings(experiment),
        *_masked(experiment),
        *experiment.federation.rule.warnings(experiment.federation.asked),
        *_few_clients(experiment),
        *_unreached_rounds(world),
    )


def _unused(world: World) -> list[str]:
    """What of the data belongs to nobody who takes part."""
    used, examples = int(world.sizes.sum()), len(world.dataset.y_train)
    if world.experiment.data.partition != "key" or used == examples:
        return []
    return [
        f"data.partition = 'key': {len(world.sizes)} clients hold {used} of {examples} training examples; those of "
        "other keys are not used (federation.clients)"
    ]


def _few_clients(experiment: Experiment) -> list[str]:
    adversary, asked = experiment.adversary, experiment.federation.asked
    if not adversary.attacks or Access.UPLOADS not in threat_model(adversary).grants or adversary.victims <= asked:
        return []
    return [f"adversary.victims = {adversary.victims}, but a round has {asked} uploads: those are attacked"]


def _masked(experiment: Experiment) -> list[str]:
    """Single uploads that the adversary cannot read."""
    adversary = experiment.adversary
    if not adversary.attacks or not experiment.hears_masked or Access.UPLOADS not in threat_model(adversary).grants:
        return []
    return [
        f"federation.secure_aggregation: under adversary.threat_model = {adversary.threat_model!r} each upload is "
        "observed masked; their sum is attacked under 'secure-aggregation'"
    ]


def _unreached_rounds(world: World) -> list[str]:
    """Attacked rounds that never happen, because the privacy budget is used up before."""
    experiment = world.experiment
    if not experiment.federation.targets:
        return []
    attacked = sorted(set(experiment.adversary.rounds)) if experiment.adversary.attacks else []
    end = last_round(experiment, world.plans, max(attacked, default=1))
    never = [str(number) for number in attacked if number > end]
    if not never:
        return []
    which = f"round {never[0]}" if len(never) == 1 else f"rounds {', '.join(never)}"
    targets = [f"federation.{key} = {target:g}" for key, target in experiment.federation.targets.items()]
    return [f"{enumerated(targets, 'or')} ends the run after round {end}: {which} of adversary.rounds will not happen"]


def _ignored_settings(experiment: Experiment) -> list[str]:
    """Settings that somebody made and that have no effect with the others."""
    config = experiment.mechanism
    if not config.protects:
        return []
    stops = ("ceiling_guess", "candidates") if experiment.federation.target_ceiling is not None else ()
    unread = [key for key in type(config).model_fields if key not in ("name", "unit", *config.effective, *stops)]
    made = [key for key in unread if getattr(config, key) != type(config).model_fields[key].default]
    return [f"mechanism.{key} is set, but {config.name} with these settings does not read it" for key in made]
