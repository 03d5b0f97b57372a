"""Each thing that can be added is in one file, alone or with its family: no other code of the project names it."""

import ast
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
from pydantic.fields import FieldInfo

from fedpriv.attacks.evasion.methods import EVASIONS, EvasionAttack
from fedpriv.attacks.evasion.methods.gradient_sign import Mim
from fedpriv.attacks.methods.closed_form import ClosedFormSettings
from fedpriv.attacks.probing import ModelAttack
from fedpriv.attacks.settings import ActiveSettings, AttackSettings, MatchingSettings
from fedpriv.core.algorithm import ModelRelease
from fedpriv.core.config import AdversaryConfig, FederationConfig
from fedpriv.core.errors import InputError
from fedpriv.core.registry import (
    ALGORITHMS,
    ATTACKS,
    DATASETS,
    MECHANISMS,
    MODELS,
    PROBES,
    RULES,
    Registry,
    check_complete,
)
from fedpriv.core.settings import Extensible
from fedpriv.data.sets.digits import Digits
from fedpriv.data.source import Source as DataSource
from fedpriv.mechanisms import MechanismSettings
from fedpriv.mechanisms.laplace import LaplaceSettings
from fedpriv.models.machinery.settings import ModelSettings
from fedpriv.server.rules import CoordinateRule
from fedpriv.server.rules.mean import Mean
from fedpriv.service.policies import POLICIES, AnswerPolicy

ROOT = Path(__file__).parents[2]
EVERY = (ATTACKS, DATASETS, EVASIONS, MECHANISMS, MODELS, POLICIES, PROBES, RULES)
NOISE_OF_ANSWERS = {
    "fedpriv/service/proof.py",
    "fedpriv/accounting/convex_models.py",
    "fedpriv/algorithms/erm/cli.py",
    "fedpriv/models/machinery/convex.py",
    "fedpriv/mechanisms/model_noise.py",
    "fedpriv/service/audit.py",
    "fedpriv/service/policies/__init__.py",
    "fedpriv/service/policies/paper.py",
    "fedpriv/service/policies/votes.py",
}
# Which other libraries know, or add.
NOISE_ELSEWHERE = {
    "fedpriv/accounting/libraries.py",
    "fedpriv/flower/audit/claims.py",
    "fedpriv/flower/noise.py",
}
PROMPTS = {"fedpriv/prompts/settings.py", "fedpriv/prompts/texts.py"}
# Words that name an answer policy, noise on a model or a form of data, and other things in many places; "none": there
# is none of it.
COMMON = {"none", "model", "label", "logits", "votes", "paper", "output", "objective", "text", "folder", "object"}
# Defaults of settings, attacks that other code builds upon, and names that are words of other things, too.
ALLOWED = {
    "digits": {"fedpriv/core/config/data.py"},
    # A file of texts, which is no data set of images; and metrics as a table.
    "csv": PROMPTS | {"fedpriv/core/trackers.py", "fedpriv/core/config/sections.py"},
    # Texts that prompts are made of, too.
    **dict.fromkeys(("agnews", "rotten_tomatoes", "sms_spam", "sst2"), PROMPTS),
    # Its tokenizer has the same name.
    "llama": {"fedpriv/core/config/data.py", "fedpriv/data/tokenizers.py"},
    # Texts are extracted from language models, too.
    "extraction": {"attacks/memorisation/audit.py"},
    # Pydantic calls the key of a union so.
    "tag": {"fedpriv/core/config/error_text.py", "fedpriv/flower/attack.py"},
    # What uploads of somebody's app are attacked with, unless told otherwise.
    "closed_form": {"fedpriv/flower/attack.py"},
    "dager": {"fedpriv/flower/attack.py"},
    "lookup": {"fedpriv/flower/attack.py"},
    "text_map": {"fedpriv/flower/attack.py"},
    "lenet": {"fedpriv/models/machinery/settings.py"},
    "strided": {"attacks/endpoint/probes/cloak.py"},
    "package.module:function": {"fedpriv/models/machinery/settings.py"},
    "mean": {
        "fedpriv/core/config/sections.py",
        "fedpriv/core/config/rules.py",
        "attacks/own_model.py",
        "attacks/reconstruction/fishing.py",  # of records
        "attacks/reconstruction/priors.py",  # of images
    },
    "dlg": {"fedpriv/core/config/sections.py"},
    "iga": {
        "fedpriv/core/config/sections.py",
        "attacks/cli.py",
        "fedpriv/flower/attack.py",
        "fedpriv/flower/audit/audit.py",
        "attacks/own_model.py",
    },
    # A role in ShareGPT's chats.
    "gpt": {"fedpriv/data/chats.py"},
    # SciPy calls a kind of bootstrap so.
    "percentile": {"attacks/intervals.py"},
    "top": {"fedpriv/sweep/page.py"},
    # Votes are accounted for as releases of the Gaussian mechanism, and noise on a sum is shown to attacks as one.
    "gaussian": {
        "attacks/methods/custom.py",
        "attacks/reconstruction/recipes.py",
        "attacks/settings.py",
        "fedpriv/accounting/aggregators.py",
        "fedpriv/diagnosis/diagnose.py",  # by which a private step is measured
    }
    | NOISE_OF_ANSWERS
    | NOISE_ELSEWHERE,
    "laplace": NOISE_OF_ANSWERS | NOISE_ELSEWHERE,
    "central": NOISE_ELSEWHERE,
}


def literals() -> Iterator[tuple[str, str]]:
    """Every text in the code, with its file."""
    for top in ("fedpriv", "clients", "server", "attacks"):
        for path in (ROOT / top).rglob("*.py"):
            if path.is_relative_to(ROOT / "fedpriv") and path.resolve() != path:
                continue
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value, str(path.relative_to(ROOT))


def test_no_other_file_names_it() -> None:
    texts = set(literals())
    for registry in EVERY:
        own = {name: Path(sys.modules[kind.__module__].__file__ or "").resolve() for name, kind in registry.items()}
        named = {(text, path) for text, path in texts if text in own and text not in COMMON}
        others = {(text, path) for text, path in named if (ROOT / path).resolve() != own[text]}
        assert {(text, path) for text, path in others if path not in ALLOWED.get(text, ())} == set(), registry.what


def test_each_is_in_the_package_of_its_kind() -> None:
    for registry in EVERY:
        modules = [kind.__module__ for kind in registry.values()]
        assert len(modules) > 3
        packages = {module.rpartition(".")[0] for module in modules}
        ends = tuple(place.removeprefix("*/") for place in registry.places)
        assert all(package.endswith(ends) for package in packages)
        assert all(first < second for first, second in pairwise(registry))


@pytest.mark.parametrize(
    ("registry", "base", "lacks"),
    [
        (ALGORITHMS, ModelRelease, "longest_model, released_model"),
        (ATTACKS, ActiveSettings, "craft"),
        (DATASETS, DataSource, "read"),
        (MECHANISMS, MechanismSettings, "mechanism"),
        (MODELS, ModelSettings, "network"),
        (POLICIES, AnswerPolicy, "answer"),
        (PROBES, ModelAttack, "run"),
        (RULES, CoordinateRule, "combine"),
    ],
    ids=lambda value: getattr(value, "what", None),
)
def test_one_that_is_not_complete_is_not_entered(registry: Registry, base: type, lacks: str) -> None:
    unfinished = type("Unfinished", (base,), {"name": "unfinished", "__annotations__": {"name": ClassVar[str]}})
    with pytest.raises(TypeError, match=f"Unfinished lacks .*{lacks}"):
        registry.register(unfinished)
    assert "unfinished" not in registry


@pytest.mark.parametrize("registry", EVERY, ids=lambda registry: registry.what)
def test_ours_are_what_those_of_others_have_to_be(registry: Registry) -> None:
    base = registry._base()
    assert all(check_complete(kind, base) is kind for name, kind in registry.items() if ":" not in name)


BASES = (Mean, AttackSettings, ClosedFormSettings, MatchingSettings, Digits, LaplaceSettings, EvasionAttack, Mim)
NAME = "name: ClassVar[str] ="
LITERAL = "name: Literal['odd'] = 'odd'"


def somebodys(code: str) -> Any:
    """A class that another package has written."""
    names: dict[str, Any] = {"__name__": "strange", "ClassVar": ClassVar, "Literal": Literal}
    names |= {kind.__name__: kind for kind in BASES}
    exec(code, names)
    return names["Odd"]


@pytest.mark.parametrize(
    ("registry", "code", "words"),
    [
        (RULES, "class Odd: name = 'odd'", "Odd is no subclass of Rule"),
        (RULES, f"class Odd(Mean): {NAME} 'a/b'", "Odd has the name 'a/b'; allowed are letters"),
        (RULES, f"class Odd(Mean): {NAME} ''", "Odd has the name ''"),
        (RULES, f"class Odd(Mean): {NAME} 3", "Odd.name = 3 is no str"),
        (RULES, f"class Odd(Mean): {NAME} 'odd'; needed: int = 3", "a key 'needed', which hides that of Rule"),
        (ATTACKS, f"class Odd(ClosedFormSettings): {NAME} 'a,b'", "Odd has the name 'a,b'"),
        (ATTACKS, f"class Odd(ClosedFormSettings): {NAME} 'odd'; title: ClassVar[str] = 3", r"Odd.title = 3 is no str"),
        (ATTACKS, f"class Odd(MatchingSettings): {NAME} 'odd'; title: ClassVar[str] = ''", "Odd lacks reference"),
        (ATTACKS, f"class Odd(MatchingSettings): {NAME} 'odd'; title = reference = 'Odd'", "Odd lacks made_of"),
        (
            ATTACKS,
            f"class Odd(AttackSettings): {NAME} 'odd'; made_of = ('odd:run',)",
            "Odd lacks iterations",
        ),
        (ATTACKS, f"class Odd(ClosedFormSettings): {NAME} 'odd'; needs: ClassVar[tuple] = ('all',)", "Odd.needs = "),
        (EVASIONS, f"class Odd(ClosedFormSettings): {NAME} 'odd'", "Odd is no subclass of EvasionAttack"),
        (EVASIONS, f"class Odd(EvasionAttack): {NAME} 'odd'; title: ClassVar[str] = 'Odd'", "Odd lacks reference"),
        (EVASIONS, f"class Odd(Mim): {NAME} 'odd'; single: ClassVar[bool] = 'yes'", "Odd.single = 'yes' is no bool"),
        (EVASIONS, f"class Odd(Mim): {NAME} 'odd,noiseless'", "Odd has the name 'odd,noiseless'"),
        (DATASETS, f"class Odd(Digits): {NAME} 'odd'; where: ClassVar[str] = None", "Odd.where = None is no str"),
        (MECHANISMS, "class Odd(LaplaceSettings): name: Literal['o.d'] = 'o.d'", r"Odd has the name 'o\.d'"),
        (MECHANISMS, f"class Odd(LaplaceSettings): {LITERAL}; draws: int = 3", "a key 'draws', which hides that of Me"),
        (MODELS, f"class Odd(LaplaceSettings): {LITERAL}", "Odd is no subclass of ModelSettings"),
    ],
)
@pytest.mark.filterwarnings("ignore:Field name")
def test_one_that_is_not_what_it_should_be_is_named(registry: Registry, code: str, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        check_complete(somebodys(code), registry._base())


def test_no_evasion_attack_has_the_name_of_another_ones_variant() -> None:
    with pytest.raises(TypeError, match="Odd has the name 'odd-noiseless'; every attack has its own -noiseless"):
        somebodys(f"class Odd(Mim): {NAME} 'odd-noiseless'")


@pytest.mark.parametrize("section", [FederationConfig, AdversaryConfig])
@pytest.mark.parametrize("key", ["rounds", "rule", "crafts", "copy", "trim"])
def test_no_key_hides_another(section: type[Extensible], key: str) -> None:
    """A key of the section, a property of it, an attribute of every model, and another key of another thing."""
    theirs = FieldInfo(annotation=str, default="")

    class Wider(section):  # type: ignore[misc, valid-type]
        @classmethod
        def entries(cls) -> Iterator[tuple[type, str, FieldInfo]]:
            yield from super().entries()
            yield Mean, key, theirs

    if key in section.further() or key in section.model_fields or hasattr(section, key):
        with pytest.raises(InputError, match=f"rules.mean:Mean: its key '{key}' is taken in Wider; choose another"):
            Wider.further()
    else:
        assert Wider.further()[key] is theirs
