"""The result of a run of votes (PATE) in words."""

from fedpriv.core.records import Knowledge, shown_epsilon


def knowledge_sentences(knowledge: Knowledge) -> list[str]:
    """Say what was asked and answered, and what the answers are worth."""
    where = "the server saw their votes" if knowledge.noise_at == "server" else "nobody saw their votes"
    asked = (
        f"{knowledge.voted} teachers voted on {knowledge.planned} public images ({where}); {knowledge.asked} questions "
        f"were put and {knowledge.answered} answered"
    )
    if knowledge.right is not None:
        asked += f", {knowledge.right:.1%} of them correctly"
    sentences = [f"{asked}."]
    if knowledge.sanitised is not None:
        sentences.append(
            f"Sanitised: on these votes the answers cost about epsilon {shown_epsilon(knowledge.sanitised)} at delta "
            f"{knowledge.delta:g} (an estimate with noise on it, no bound; the ledger's figure is the claim)."
        )
    return sentences
