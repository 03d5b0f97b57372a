"""The table of attacks: what each is called, what it needs of the threat model, its settings, and what runs it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from attacks.reconstruction.first_layer.closed_form import run_closed_form
from attacks.reconstruction.first_layer.imprint import NEEDS as IMPRINT_NEEDS
from attacks.reconstruction.first_layer.imprint_reading import run_imprint
from attacks.reconstruction.posterior.map import run_map
from attacks.reconstruction.recipes.descent import run_recipe
from attacks.reconstruction.recipes.parts import Recipe
from attacks.reconstruction.results import Outcome
from attacks.reconstruction.scene import Report, Scene
from attacks.reconstruction.upload_model.model import Victim
from attacks.threat import Access
from fedpriv.config import ClosedFormConfig, CustomConfig, DlgConfig, IdlgConfig, IgaConfig, ImprintConfig, MapConfig

__all__ = ["ATTACKS", "GRADIENT_MATCHING", "Attack", "Settings", "is_active"]

# A sum of several clients' uploads serves as well: it is an upload of their examples together.
GRADIENT_MATCHING = (Access.PARAMETERS, Access.SUM, Access.BATCH_SIZE)

Settings = DlgConfig | IgaConfig | ClosedFormConfig | CustomConfig | MapConfig | ImprintConfig


@dataclass(frozen=True)
class Attack:
    """One line of the table of attacks.

    Attributes:
        name: the name in the experiment file.
        title: what it is called.
        reference: the paper.
        needs: what the threat model must grant.
        tunable: the settings whose best value depends on the data and the noise (``fedpriv attack tune``).
        config: its settings' class.
        method: its parts; or, where it is not made of them, what runs it on a chunk of rows: (scene, rows, images,
            logits, config, report) -> Outcome.
        turns: further recipes, with which ``method`` takes turns: of a victim's restarts the first runs ``method``, the
            second the first of these, and so on, and then from the start again.
    """

    name: str
    title: str
    reference: str
    needs: tuple[Access, ...]
    tunable: tuple[str, ...]
    config: type[Settings]
    method: Recipe | Callable[..., Outcome]
    turns: tuple[Recipe, ...] = ()

    @property
    def runs(self) -> tuple[Callable[..., Outcome], ...]:
        """What runs it on a chunk of rows, for a victim's restarts in turn."""
        methods = (self.method, *self.turns)
        return tuple(partial(run_recipe, one) if isinstance(one, Recipe) else one for one in methods)

    @property
    def parts(self) -> Mapping[str, str]:
        """Kind of part -> part, or the parts that restarts take in turn; empty where it is not made of these."""
        every = [one.parts for one in (self.method, *self.turns) if isinstance(one, Recipe)]
        kinds = every[0] if every else ()
        return {kind: " and in turn ".join(dict.fromkeys(parts[kind] for parts in every)) for kind in kinds}

    @property
    def active(self) -> bool:
        """Whether the clients must have been sent parameters of the adversary's own making: a worst case."""
        return Access.ACTIVE in self.needs


def run_custom(
    scene: Scene, rows: Sequence[Victim], images: Tensor, logits: Tensor, config: CustomConfig, report: Report
) -> Outcome:
    """Run the recipe that the settings are; arguments as for :func:`run_recipe`."""
    recipe = Recipe(
        config.objective,
        config.optimiser,
        config.schedule,
        config.variables,
        config.start,
        config.box,
        ("tv", "public_mean", "gaussian"),
        ("known", "read", "optimised") if config.read_labels else ("known", "optimised"),
    )
    return run_recipe(recipe, scene, rows, images, logits, config, report)


ATTACKS: Mapping[str, Attack] = {
    attack.name: attack
    for attack in (
        Attack(
            "dlg",
            "Deep Leakage from Gradients",
            "Zhu, Liu and Han: Deep Leakage from Gradients, NeurIPS 2019",
            GRADIENT_MATCHING,
            (),
            DlgConfig,
            Recipe("squared-distance", "lbfgs", variables="decorrelated", labels=("known", "optimised")),
            (Recipe("squared-distance", "lbfgs", variables="pixels", labels=("known", "optimised")),),
        ),
        Attack(
            "idlg",
            "Improved Deep Leakage from Gradients",
            "Zhao, Mopuri and Bilen: iDLG: Improved Deep Leakage from Gradients, 2020",
            GRADIENT_MATCHING,
            (),
            IdlgConfig,
            Recipe("squared-distance", "lbfgs", variables="decorrelated"),
        ),
        Attack(
            "iga",
            "Inverting Gradients",
            "Geiping, Bauermeister, Dröge and Moeller: Inverting Gradients, NeurIPS 2020",
            GRADIENT_MATCHING,
            ("tv",),
            IgaConfig,
            Recipe("cosine", "signed-adam", "steps", box=True, priors=("tv",)),
        ),
        Attack(
            "closed_form",
            "First Linear layer in closed form",
            "Phong, Aono, Hayashi, Wang and Moriai: Privacy-Preserving Deep Learning via Additively Homomorphic "
            "Encryption, 2018; batches: Dimitrov, Baader, Müller and Vechev: SPEAR, NeurIPS 2024",
            GRADIENT_MATCHING,
            (),
            ClosedFormConfig,
            run_closed_form,
        ),
        Attack(
            "map",
            "Noise-adaptive maximum a posteriori",
            "after Balunović, Dimitrov, Staab and Vechev: Bayesian Framework for Gradient Leakage, ICLR 2022; with the "
            "mechanism's own noise",
            GRADIENT_MATCHING,
            (),
            MapConfig,
            run_map,
        ),
        Attack(
            "custom",
            "Parts of your own choice",
            "Geiping et al., NeurIPS 2020, and Zhu et al., NeurIPS 2019, for the parts",
            GRADIENT_MATCHING,
            ("tv",),
            CustomConfig,
            run_custom,
        ),
        Attack(
            "imprint",
            "Imprint, an active server",
            "Fowl, Geiping, Czaja, Goldblum and Goldstein: Robbing the Fed, ICLR 2022",
            IMPRINT_NEEDS,
            (),
            ImprintConfig,
            run_imprint,
        ),
    )
}


def is_active(label: str) -> bool:
    """Whether an attack needs parameters of the adversary's own making.

    Args:
        label: the attack's name, or the name with settings as scores have it, such as ``iga,tv=0.001``; or a guess's.
    """
    attack = ATTACKS.get(label.partition(",")[0])
    return attack is not None and attack.active
