"""The model as an endpoint: what its answers show, what is proven, how many are used; words of the report."""

from fedpriv.core.numbers import count, figure, percent
from fedpriv.core.records import AnswersAudit, Guarantee, Interval
from fedpriv.core.report.drawing import Plot
from fedpriv.core.report.figures import questions_plot
from fedpriv.core.report.view import Endpoint
from fedpriv.service.ledger import OWNER

Fact = tuple[str, str]

_CUT_OFF = "lines that were cut off"


def endpoint_facts(endpoint: Endpoint) -> list[Fact]:
    """Return what there is to say, as terms with their text."""
    service, guarantee = endpoint.service, endpoint.service.guarantee
    facts = [
        ("Answers used", _used(endpoint)),
        ("Proven of all planned answers", _proven(guarantee)),
    ]
    if guarantee.nominal_epsilon is not None and guarantee.epsilon is None:
        facts.append(("Claimed of one answer, not proven", f"ε = {figure(guarantee.nominal_epsilon)} (nominal)"))
    if endpoint.referee is not None:
        referee = endpoint.referee
        facts.append(("Right on test images, exact scores", _share(referee.accuracy)))
        facts.append(("Right on test images, as answered", _share(referee.answered)))
    if service.head is not None:
        head = service.head
        facts.append(
            (
                "Sensitivity of the weights (proven)",
                f"{figure(head.sensitivity)}, of n = {count(head.examples)} examples, "
                f"λ = {figure(head.regularisation)}, R = {figure(head.norm)}, τ = {figure(head.tolerance)}",
            )
        )
    if service.learnt is not None:
        facts.append(
            (
                "Features",
                f"the network of {service.learnt.run} before its last layer, {_proven(service.learnt.guarantee)} of it",
            )
        )
    if service.scale:
        facts.append(("Scale of the noise", figure(service.scale)))
    return [*facts, *(_audited(endpoint.audit) if endpoint.audit else [])]


def endpoint_notes(endpoint: Endpoint) -> list[str]:
    """Return what a reader must know with the figures: what each rests on, and what is a measurement only."""
    guarantee = endpoint.service.guarantee
    notes = [f"Adjacency: {guarantee.adjacency}.", f"Epsilon: {guarantee.theorem['epsilon']}."]
    notes += [f"{note[:1].upper()}{note[1:]}." for note in guarantee.notes]
    if endpoint.audit is not None:
        notes.append("How far models moved when one example was replaced is measured, and no guarantee.")
    return notes


def endpoint_refuted(endpoint: Endpoint) -> str:
    """Return what is wrong with what is claimed of the answers; empty: nothing is."""
    guarantee, audit = endpoint.service.guarantee, endpoint.audit
    if audit is not None and audit.refutes and audit.bound is not None and audit.claimed is not None:
        kind = "proven" if audit.proven else "claimed"
        return (
            f"A game on neighbouring data shows ε of at least {figure(audit.bound.epsilon)} of one answer; {kind}: "
            f"{figure(audit.claimed)}."
        )
    if guarantee.nominal_epsilon is not None and guarantee.epsilon is None:
        return f"Nothing is proven: {guarantee.theorem['epsilon']}."
    return ""


def answers_plot(endpoint: Endpoint) -> Plot | None:
    """Draw how often answers are right against how many there are; ``None`` where no policy is proven."""
    referee = endpoint.referee
    if referee is None or not referee.curves:
        return None
    epsilon = endpoint.service.guarantee.epsilon if referee.epsilon is None else referee.epsilon
    if epsilon is None:
        return None
    exact = referee.accuracy.value
    said = (
        f"Right answers, where epsilon {figure(epsilon)} is for all answers together, by how many they are, under each "
        f"policy with the same model; exact scores are right in {percent(exact)}"
    )
    curves = [(curve.policy, curve.points) for curve in referee.curves]
    return questions_plot(curves, (exact, f"exact scores {percent(exact)}"), "right on test images", said)


def _used(endpoint: Endpoint) -> str:
    """What the query ledger says; users are keys that the folder's owner gave out."""
    used = f"{count(sum(endpoint.used.values()))} of {count(endpoint.service.answers)}"
    if set(endpoint.used) <= {OWNER}:
        return used
    return f"{used}: " + ", ".join(f"{name or _CUT_OFF} {count(each)}" for name, each in sorted(endpoint.used.items()))


def _proven(guarantee: Guarantee) -> str:
    if guarantee.epsilon is None:
        return "nothing"
    pure = "" if guarantee.pure_epsilon is None else f"; pure ε = {figure(guarantee.pure_epsilon)}"
    return f"ε = {figure(guarantee.epsilon)} at δ = {figure(guarantee.delta)}{pure}"


def _share(share: Interval) -> str:
    ends = share.ends
    return percent(share.value) + ("" if ends is None else f" ({percent(ends[0])} to {percent(ends[1])})")


def _audited(audit: AnswersAudit) -> list[Fact]:
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
