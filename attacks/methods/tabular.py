"""Rows of tables from gradients (Vero et al. 2023)."""

from typing import ClassVar, Literal

from pydantic import Field

from fedpriv.attacks.settings import MatchingSettings
from fedpriv.core.registry import ATTACKS
from fedpriv.core.settings import Count, Positive


@ATTACKS.register
class TabularSettings(MatchingSettings):
    """Adam on the angle between gradients, a softmax for each category, and a pool of all restarts."""

    name: ClassVar[str] = "tabular"
    title: ClassVar[str] = "Rows of tables (TabLeak)"
    label: ClassVar[str] = "TabLeak"
    reference: ClassVar[str] = (
        "after Vero, Balunović, Dimitrov and Vechev: TabLeak: Tabular Data Leakage in Federated Learning, ICML 2023"
    )
    is_of_rows: ClassVar[bool] = True
    made_of: ClassVar[tuple[str, ...]] = ("fedpriv.attacks.reconstruction.recipes:run_ensemble",)

    iterations: Count = Field(1000, description="steps of Adam")
    restarts: Count = Field(16, description="random starts, of which the pool is made")
    learning_rate: Positive = Field(0.1, description="of Adam, falling to 0 like a cosine")
    start: Literal["normal", "closed-form"] = Field(
        "normal", description="normal: random; closed-form: at the rows that the first Linear layer shows"
    )
