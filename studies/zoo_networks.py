"""Networks of :mod:`studies.zoo` that no name alone builds: smaller ones of torchvision, and adapters of peft.

What takes texts takes ``length``, ``vocabulary`` and ``classes``, which are as many as the vocabulary where the next
token is predicted.
"""

from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

# Of networks of transformers; each configuration takes what it knows.
SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
}
NAMES = {"gpt2": {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}}


def swin_v2(num_classes: int) -> Any:
    """Return torchvision's Swin V2 with a block in each of two stages."""
    from torchvision.models.swin_transformer import PatchMergingV2, SwinTransformer, SwinTransformerBlockV2

    sizes: dict[str, Any] = {
        "patch_size": [4, 4],
        "embed_dim": 32,
        "depths": [1, 1],
        "num_heads": [2, 2],
        "window_size": [4, 4],
    }
    return SwinTransformer(
        **sizes, num_classes=num_classes, block=SwinTransformerBlockV2, downsample_layer=PatchMergingV2
    )


def convnext(num_classes: int) -> Any:
    """Return torchvision's ConvNeXt with a block in each of two stages."""
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    return ConvNeXt([CNBlockConfig(16, 32, 1), CNBlockConfig(32, None, 1)], 0.1, num_classes=num_classes)


def efficientnet_v2(num_classes: int) -> Any:
    """Return torchvision's EfficientNet V2 with two blocks."""
    from torchvision.models.efficientnet import EfficientNet, FusedMBConvConfig, MBConvConfig

    blocks = [FusedMBConvConfig(2, 3, 1, 8, 16, 1), MBConvConfig(2, 3, 2, 16, 24, 1)]
    return EfficientNet(blocks, dropout=0.1, last_channel=64, num_classes=num_classes)


def vgg(num_classes: int, kind: str) -> nn.Module:
    """Return the features of one of torchvision's VGG, and a Linear layer."""
    from torchvision import models

    return nn.Sequential(
        models.get_model(kind).features, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, num_classes)
    )


def bottlenecks(num_classes: int, groups: int, width: int) -> Any:
    """Return a ResNeXt or Wide ResNet of torchvision with a block in each stage."""
    from torchvision.models.resnet import Bottleneck, ResNet

    return ResNet(Bottleneck, [1, 1, 1, 1], num_classes=num_classes, groups=groups, width_per_group=width)


def unwrapped_vit(shape: tuple[int, int, int], classes: int) -> Any:
    """Return a network of transformers as it is, whose forward returns an object."""
    import transformers

    sizes = {**SIZES, "image_size": shape[-1], "patch_size": 8, "num_labels": classes}
    return transformers.ViTForImageClassification(transformers.ViTConfig(**sizes))


def gmlp(shape: tuple[int, int, int], classes: int) -> Any:
    """Return timm's gMLP with two blocks."""
    from timm.layers.mlp import GatedMlp
    from timm.models.mlp_mixer import MlpMixer, SpatialGatingBlock

    blocks: dict[str, Any] = {"num_blocks": 2, "embed_dim": 512, "mlp_ratio": 6, "block_layer": SpatialGatingBlock}
    return MlpMixer(num_classes=classes, img_size=shape[-1], patch_size=16, mlp_layer=GatedMlp, **blocks)


def convformer(num_classes: int) -> Any:
    """Return timm's ConvFormer with a block in each stage."""
    from timm.models.metaformer import LayerNorm2dNoBias, MetaFormer, SepConv

    sizes: dict[str, Any] = {"depths": (1, 1, 1, 1), "dims": (16, 32, 64, 96)}
    return MetaFormer(num_classes=num_classes, token_mixers=SepConv, norm_layers=LayerNorm2dNoBias, **sizes)


def evonorm_b0(num_classes: int) -> Any:
    """Return timm's EfficientNet-B0 with EvoNorm-B0, whose running variance a batch shares."""
    import timm

    return timm.create_model("efficientnet_b0", num_classes=num_classes, norm_layer="evonormb0")


def text_network(length: int, vocabulary: int, classes: int, kind: str, padded: bool = True) -> Any:
    """Return a small network of transformers for texts; ``padded``: its configuration names the padding token."""
    import transformers

    usual: Any = transformers.AutoConfig.for_model(kind)
    names = NAMES.get(kind, {})
    sizes = {names.get(key, key): value for key, value in SIZES.items()}
    sizes = {key: value for key, value in sizes.items() if hasattr(usual, key)}
    tokens = {"vocab_size": vocabulary, "num_labels": classes, "bos_token_id": 1, "eos_token_id": 2}
    config = type(usual)(**sizes, **tokens, **({"pad_token_id": 0} if padded else {}))
    task = "CausalLM" if classes == vocabulary else "SequenceClassification"
    return getattr(transformers, f"AutoModelFor{task}").from_config(config)


class Ended(nn.Module):
    """Puts the token that ends a text behind each sequence, where encoder and decoder read its label."""

    def __init__(self, network: nn.Module, token: int) -> None:
        super().__init__()
        self.network, self.token = network, token

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens to logits."""
        end = tokens.new_full((len(tokens), 1), self.token)
        return self.network(torch.cat([tokens.masked_fill(tokens == self.token, 3), end], dim=1)).logits


def ended(length: int, vocabulary: int, classes: int, kind: str) -> nn.Module:
    """Return a small T5 or BART for the label of a text."""
    import transformers

    own = {
        "t5": {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0},
        "bart": {
            "d_model": 16,
            **{f"{side}_{key}": size for side in ("encoder", "decoder") for key, size in _BART.items()},
        },
    }[kind]
    tokens = {"vocab_size": vocabulary, "num_labels": classes, "eos_token_id": 2, "pad_token_id": 0}
    config = transformers.AutoConfig.for_model(kind, **own, **tokens)
    return Ended(transformers.AutoModelForSequenceClassification.from_config(config), 2)


_BART = {"layers": 1, "attention_heads": 2, "ffn_dim": 32}


class Cut(nn.Module):
    """Leaves out the logits of virtual tokens, which stand first."""

    def __init__(self, network: nn.Module, virtual: int) -> None:
        super().__init__()
        self.network, self.virtual = network, virtual

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens to logits."""
        logits: Tensor = self.network(tokens).logits
        return logits[:, self.virtual :]


def prompted(length: int, vocabulary: int, classes: int, kind: str, virtual: int) -> nn.Module:
    """Return a small network of transformers with prompts of peft, which gives logits of the texts alone."""
    import peft

    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=virtual)
    network: Any = peft.get_peft_model(text_network(length, vocabulary, classes, kind), config)
    return Cut(network, virtual)
