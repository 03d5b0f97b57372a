"""What is proven about central noise: of the models, against whoever is not the server."""

from typing import ClassVar

from typing_extensions import override

from fedpriv.accounting.gaussian_proof import GaussianProof
from fedpriv.accounting.references import Reference

_UNSAMPLED = "No amplification by the sampling of clients is claimed here: whoever sees who was asked is covered, too."
_SAMPLED = (
    "Amplified by the sampling of clients: it holds only against those who do not see who was asked, and rests on the "
    "draw being secret."
)
_TRUSTED = "The server is trusted: it sees every clipped update without noise, and nothing is proven against it."


class CentralProof(GaussianProof):
    """Each update is clipped to clip_norm, and a server adds noise of deviation sigma * clip_norm to a round's sum.

    The noisy sum is divided by a public number, so what every round releases is the Gaussian mechanism on the clients'
    updates. Replace-one (a client's update becomes any other) has sensitivity 2 clip_norm, zero-out (it counts as
    zero) clip_norm. With clients in place of examples, Poisson and fixed-size sampling amplify as they do for batches.
    """

    whole_clients: ClassVar[bool] = True
    mechanism = "Gaussian mechanism on the sum of clipped updates"

    @override
    def reference(self) -> Reference | None:
        return None

    @property
    @override
    def no_reference(self) -> str:
        return "an upload has no noise before the server adds it to the sum"

    @override
    def notes(self) -> tuple[str, ...]:
        return (_TRUSTED, _UNSAMPLED if self.release.sampling == "full" else _SAMPLED)
