"""The model as an endpoint, in reports and tables of sweeps."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field
from typing_extensions import override

from fedpriv.core.config import Experiment
from fedpriv.core.errors import InputError
from fedpriv.core.figure import Figure
from fedpriv.core.finding import Columns, Finding, RunView, Section
from fedpriv.core.numbers import count, figure, percent
from fedpriv.core.progress import Silent
from fedpriv.core.registry import FINDINGS
from fedpriv.core.runs import RunFolder
from fedpriv.service.records import AnswersAudit, Referee, Service, answered
from fedpriv.service.settings import ServiceConfig

if TYPE_CHECKING:
    from fedpriv.core.report.drawing import Plot


@dataclass(frozen=True)
class ServiceView:
    """The model as an endpoint."""

    service: Service  # what it is, and what is proven
    referee: Referee | None  # its accuracies; `None` if the file is gone
    used: Mapping[str, int]  # answers that were charged, by user
    audit: AnswersAudit | None  # what an audit found; `None` if there was none


Fact = tuple[str, str]

_REPLACED = 6  # training examples of a trial, one at a time, where a claim that nothing proves is audited


def answers_plot(endpoint: ServiceView) -> "Plot | None":
    """Draw how often answers are right against how many there are; ``None`` where no policy is proven."""
    from fedpriv.core.report.drawing import questions_plot

    referee = endpoint.referee
    if referee is None or not referee.curves:
        return None
    epsilon = endpoint.service.guarantee.epsilon if referee.epsilon is None else referee.epsilon
    if epsilon is None:
        return None
    exact = referee.accuracy.value
    said = (
        f"Share of right answers by the number of answers that epsilon {figure(epsilon)} covers together, for each "
        f"policy with the same model; exact scores are right in {percent(exact)}"
    )
    curves = [(curve.policy, curve.points) for curve in referee.curves]
    return questions_plot(curves, (exact, f"exact scores {percent(exact)}"), "right on test images", said)


def audited(audit: AnswersAudit) -> list[Fact]:
    """Return what an audit found."""
    facts = [
        (
            "Models moved, measured over bound",
            f"{figure(audit.moved)} at most, of {count(audit.replaced)} replacements; a logit {figure(audit.shifted)}, "
            f"above its bound in {percent(audit.above)}",
        )
    ]
    if audit.bound is not None and audit.claimed is not None:
        word = "proven" if audit.proven else "claimed"
        facts.append(
            (
                "Epsilon of one answer, measured",
                f"at least {figure(audit.bound.epsilon)} ({percent(audit.bound.confidence)} confidence); {word}: "
                f"{figure(audit.claimed)}",
            )
        )
    if audit.recovered is not None:
        facts.append(("Exact vectors from two answers each", percent(audit.recovered)))
    return facts


class ServedColumns(Columns):
    """What an endpoint adds to the record of a trial."""

    answers: str | None = Field(None, description="policy of the model as an endpoint")
    answers_planned: int | None = Field(None, description="images that it answers in all")
    answers_exact: float | None = Field(None, description="share of the test images right by the exact scores")
    answers_right: float | None = Field(None, description="share of the test images right as answered")
    answers_noise: float | None = Field(None, description="scale of the answers' noise")
    answers_epsilon: float | None = Field(None, description="proven for all planned answers, at answers_delta")
    answers_pure: float | None = Field(None, description="proven for all planned answers, at delta = 0")
    answers_nominal: float | None = Field(None, description="claimed for one answer, and not proven")
    answers_delta: float | None = Field(None, description="of answers_epsilon")
    answers_bound: float | None = Field(None, description="measured: epsilon of one answer is at least this")
    answers_moved: float | None = Field(
        None, description="measured: how far one example moved the model, over the proven or claimed bound"
    )
    answers_shifted: float | None = Field(None, description="measured: the same of a logit")
    answers_recovered: float | None = Field(None, description="share of exact vectors that two answers gave away")


@FINDINGS.register
class ServedFinding(Finding[ServiceView]):
    """The model as an endpoint."""

    name: ClassVar[str] = "service"
    rank: ClassVar[int] = 60
    refuted: ClassVar[str] = "What is claimed about the answers is not proven"
    columns: ClassVar[type[Columns] | None] = ServedColumns
    files: ClassVar[tuple[str, ...]] = ("service/service.json", "service/audit.json")

    @override
    def read(self, folder: RunFolder) -> ServiceView | None:
        if (service := folder.read(Service)) is None:
            return None
        return ServiceView(service, folder.read(Referee), answered(folder.path), folder.read(AnswersAudit))

    @override
    def asked_of_trials(self, experiment: Experiment) -> Mapping[str, str]:
        return {} if ServiceConfig.of(experiment) is None else {"the endpoint": ""}

    @override
    def measure_trial(self, folder: RunFolder) -> None:
        from fedpriv.service.audit import audit_answers
        from fedpriv.service.opening import open_service

        if ServiceConfig.of(folder.experiment()) is None:
            return
        try:
            open_service(folder, None, Silent()).close()
            service = folder.read(Service)
            if service is not None and service.guarantee.nominal_epsilon is not None:
                audit_answers(folder, _REPLACED, Silent())
        except InputError as error:
            raise InputError(f"service: {error}") from None

    @override
    def figures(self, found: ServiceView) -> tuple[Figure, ...]:
        return () if found.audit is None else found.audit.figures

    @override
    def alarms(self, found: ServiceView) -> tuple[str, ...]:
        guarantee = found.service.guarantee
        nominal = guarantee.nominal_epsilon is not None and guarantee.epsilon is None
        unproven = (f"nothing is proven: {guarantee.theorem['epsilon']}",) if nominal else ()
        return super().alarms(found) or unproven

    @override
    def section(self, found: ServiceView, view: RunView) -> Section:
        measured = audited(found.audit) if found.audit else []
        return Section("answers", "Answers", {**vars(found), "measured": measured, "right": answers_plot(found)})

    @override
    def trial(self, found: ServiceView) -> Mapping[str, Any]:
        service, proven, referee, audit = found.service, found.service.guarantee, found.referee, found.audit
        figures: dict[str, Any] = {
            "answers": service.method,
            "answers_planned": service.answers,
            "answers_noise": service.scale,
            "answers_epsilon": proven.epsilon,
            "answers_pure": proven.pure_epsilon,
            "answers_nominal": proven.nominal_epsilon,
            "answers_delta": proven.delta,
        }
        if referee is not None:
            figures |= {"answers_exact": referee.accuracy.value, "answers_right": referee.answered.value}
        if audit is not None:
            figures |= {
                "answers_moved": audit.moved,
                "answers_shifted": audit.shifted,
                "answers_recovered": audit.recovered,
            }
            figures["answers_bound"] = None if audit.bound is None else audit.bound.epsilon
        return figures
