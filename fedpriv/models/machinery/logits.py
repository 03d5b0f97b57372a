"""Networks whose forward takes an attention mask, built from the tokens, or returns more than logits."""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from fedpriv.core.names import END, PAD

_IMPLEMENTATIONS = ("sdpa", "eager")  # of attention in transformers, whose masks are tensors
_is_whole: ContextVar[bool] = ContextVar("_is_whole", default=False)


class LogitsOf(nn.Module):
    """A network of texts of which the logits are taken: what it returns, or what is called so in it.

    Where the network's forward takes ``attention_mask``, it is given one, int64 (B, T): 1 for tokens, 0 for padding.
    The first position is always 1, so that an empty text has something to attend to. Configurations of transformers
    are told the number of the padding token, by which classifiers find a text's last token. Those with an encoder and a
    decoder find it by an end, which is put behind each text.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self._takes_mask = _takes_mask(network)
        self._takes_end = bool(getattr(getattr(network, "config", None), "is_encoder_decoder", False))
        for layer in network.modules():
            text_config = getattr(getattr(layer, "config", None), "get_text_config", None)
            if callable(text_config):
                text_config().pad_token_id = PAD
                if self._takes_end:
                    text_config().eos_token_id = END
        _register_whole_masks()

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens to logits."""
        if self._takes_end:
            lengths = (tokens != PAD).sum(dim=1, keepdim=True)
            tokens = nn.functional.pad(tokens, (0, 1), value=PAD).scatter(1, lengths, END)
        with _whole_masks():
            returned = self.network(tokens, attention_mask=_seen(tokens)) if self._takes_mask else self.network(tokens)
        logits: Tensor = logits_in(returned)
        # Prompts that peft has put before the tokens have logits, too.
        return logits[:, -tokens.shape[1] :] if logits.ndim == 3 else logits


def logits_in(returned: Any) -> Any:
    """Return what is called logits in an object or dict; else the first part of a tuple; else what was given."""
    if isinstance(returned, Mapping):
        returned = returned.get("logits", returned)
    found = getattr(returned, "logits", returned)
    return found[0] if isinstance(found, tuple) and found else found


def give_logits(network: nn.Module) -> None:
    """Have a network of images give nothing but its logits, under the names that its parameters have."""
    network.register_forward_hook(_logits_hook)


def _logits_hook(network: nn.Module, given: Any, returned: Any) -> Any:
    return logits_in(returned)


def _takes_mask(network: nn.Module) -> bool:
    network = getattr(network, "_orig_mod", network)  # of torch.compile
    base = getattr(network, "get_base_model", None)  # of peft
    try:
        return "attention_mask" in inspect.signature((base() if callable(base) else network).forward).parameters
    except ValueError:  # a traced network has no signature, and takes what it was traced with
        return False


def _seen(tokens: Tensor) -> Tensor:
    seen = (tokens != PAD).long()
    seen[:, 0] = 1
    return seen


@contextmanager
def _whole_masks() -> Iterator[None]:
    """Inside the block, transformers builds every mask that has padding to tell of."""
    before = _is_whole.set(True)
    try:
        yield
    finally:
        _is_whole.reset(before)


def _register_whole_masks() -> None:
    """Have transformers, where it is imported, build masks inside :func:`_whole_masks` without a look at their numbers.

    It leaves out a mask that hides nothing. So a padded text would choose the kernel, and the rounding, of a whole
    batch; and ``torch.func.vmap`` allows no such look.
    """
    masking = sys.modules.get("transformers.masking_utils")
    if masking is None:
        return
    for name in _IMPLEMENTATIONS:
        build = masking.ALL_MASK_ATTENTION_FUNCTIONS[name]
        if not isinstance(build, _WholeMask):
            masking.AttentionMaskInterface.register(name, _WholeMask(build))


class _WholeMask:
    """A function of transformers that builds masks, which inside :func:`_whole_masks` always returns one.

    Where padding sees nothing, as within a sliding window, it is shown everything: the softmax over nothing is NaN,
    which the next layer would spread, and nobody looks at padding itself.
    """

    def __init__(self, build: Callable[..., Any]) -> None:
        self._build = build

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        if not _is_whole.get() or keywords.get("attention_mask") is None:
            return self._build(*arguments, **keywords)
        skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        mask: Tensor = self._build(*arguments, **{**keywords, **skips})
        is_added = mask.is_floating_point()  # to scores: 0 where a position is seen
        is_seen = mask == 0 if is_added else mask
        return mask.masked_fill(~is_seen.any(dim=-1, keepdim=True), 0 if is_added else 1)
