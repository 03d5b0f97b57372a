"""The section ``[service]``: what the finished model answers, to how many questions, and with which noise."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic.fields import FieldInfo
from typing_extensions import override

from fedpriv.core.errors import InputError
from fedpriv.core.registry import SECTIONS
from fedpriv.core.sections import ExperimentSection
from fedpriv.core.settings import Count, Extensible
from fedpriv.service.policies import POLICIES


def _known(method: str) -> str:
    kind = POLICIES[method.partition(":")[0]]
    if ":" in method and not kind.argument:
        raise InputError(f"{method.partition(':')[0]} takes nothing behind a colon")
    return method


@SECTIONS.register
class ServiceConfig(ExperimentSection, Extensible):
    """An endpoint: a policy with its keys, and its budget."""

    name: ClassVar[str] = "service"
    rank: ClassVar[int] = 4
    about: ClassVar[str] = "the finished model behind an endpoint (fedpriv serve); unset: exact answers"

    method: Annotated[str, AfterValidator(_known)] = Field(
        "none", description="answer policy, with an argument after a colon, such as rounded:2 or top:3"
    )
    answers: Count = Field(100, description="images that are answered in all, a hard budget")
    repeats: Literal["stored", "charged"] = Field(
        "stored", description="the same question again gets the stored answer, free; or a new one, charged again"
    )

    @model_validator(mode="after")
    def _keys_are_the_policys(self) -> Self:
        """Build it once, and refuse keys that it does not read."""
        kind = type(self.policy)
        for key, field in type(self).model_fields.items():
            read = key in kind.model_fields or key in ServiceConfig.__annotations__
            if not read and getattr(self, key) != field.get_default(call_default_factory=True):
                raise InputError(f"{key} is set, and method = {self.method!r} does not read it")
        return self

    def told(self) -> dict[str, Any]:
        """Return the settings as they are kept and as noise is keyed by them; ``randomness`` only where it is set."""
        known = self.model_dump(mode="json")
        return {key: value for key, value in known.items() if (key, value) != ("randomness", "seeded")}

    @override
    def decisive(self) -> dict[str, Any]:
        """None: what the endpoint answers changes no upload."""
        return {}

    @classmethod
    @override
    def entries(cls) -> Iterator[tuple[type[Any], str, FieldInfo]]:
        """What single policies read."""
        for kind in POLICIES.values():
            yield from ((kind, key, field) for key, field in kind.model_fields.items())

    @property
    def policy(self) -> Any:
        """The answer policy, with its settings."""
        name, colon, argument = self.method.partition(":")
        kind = POLICIES[name]
        settings = {key: getattr(self, key) for key in kind.model_fields}
        return kind.model_validate(settings | ({kind.argument: argument} if colon else {}))
