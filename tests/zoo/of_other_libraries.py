"""Models of torch, timm, torchvision, PEFT, diffusers and sentence-transformers; those whose library is there."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.model import Model

SAMPLES, CLASSES = 4, 3

# The smallest of each family, and what makes it smaller still.
TIMM: dict[str, dict[str, Any]] = {
    "test_byobnet": {},
    "test_convnext": {},
    "test_efficientnet": {},
    "test_mambaout": {},
    "test_nfnet": {},
    "test_resnet": {},
    "test_vit": {},
    "test_vit_relpos": {"img_size": 64},
    "test_vit2": {},
    "test_vit3": {"img_size": 64},
    "convnext_atto": {},
    "coat_lite_tiny": {"img_size": 64, "embed_dims": (32, 64, 64, 64)},
    "convit_tiny": {"img_size": 64, "depth": 3, "local_up_to_layer": 2},
    "crossvit_9_240": {"pixels": 240},
    "cs3darknet_focus_s": {},
    "dla46_c": {},
    "dpn48b": {"k_sec": (1, 1, 1, 1)},
    "ese_vovnet19b_slim": {},
    "resnet10t": {"channels": (16, 32, 64, 128)},
    "edgenext_xx_small": {},
    "efficientformer_l1": {"pixels": 224},
    "efficientformerv2_s0": {"img_size": 64},
    "efficientvit_b0": {},
    "efficientvit_m0": {"img_size": 64, "depth": (1, 1, 1)},
    "fasternet_t0": {},
    "fastvit_t8": {},
    "lcnet_050": {},
    "mobilenetv3_small_050": {},
    "mobilenetv2_050": {},
    "mobilenetv4_conv_small_050": {},
    "mnasnet_small": {},
    "tinynet_e": {},
    "ghostnet_050": {"drop_rate": 0.0},
    "gmlp_ti16_224": {"img_size": 64},
    "hardcorenas_a": {},
    "hgnetv2_b0": {},
    "inception_next_atto": {},
    "legacy_seresnet18": {"drop_rate": 0.0},
    "levit_128s": {"img_size": 64},
    "mobilevit_xxs": {},
    "mobilevitv2_050": {},
    "pit_ti_224": {"img_size": 64},
    "pvt_v2_b0": {},
    "regnetx_002": {},
    "repghostnet_050": {"drop_rate": 0.0},
    "repvit_m0_9": {"embed_dim": (16, 32, 48, 64), "depth": (1, 1, 1, 1)},
    "resnest14d": {"base_width": 16},
    "rexnet_100": {"width_mult": 0.5, "depth_mult": 0.4},
    "semnasnet_075": {},
    "shvit_s1": {},
    "skresnet18": {"channels": (16, 32, 64, 128)},
    "spnasnet_100": {},
    "starnet_s1": {},
    "swiftformer_xs": {},
    "tiny_vit_5m_224": {"pixels": 224},
    "visformer_tiny": {"img_size": 64},
    "csatv2": {},
    "vit_tiny_patch16_224": {"img_size": 64, "depth": 2},
    "deit_tiny_patch16_224": {"img_size": 64, "depth": 2},
    "eva02_tiny_patch14_224": {"img_size": 56, "depth": 2, "pixels": 56},
    "cait_xxs24_224": {"img_size": 64, "depth": 2},
    "xcit_nano_12_p16_224": {"img_size": 64, "depth": 2},
    "beit_base_patch16_224": {"img_size": 64, "depth": 2, "embed_dim": 48, "num_heads": 4},
    "swin_tiny_patch4_window7_224": {
        "img_size": 64,
        "embed_dim": 24,
        "depths": (1, 1, 2, 1),
        "num_heads": (1, 2, 4, 8),
        "window_size": 4,
    },
    "swinv2_tiny_window8_256": {
        "img_size": 64,
        "embed_dim": 24,
        "depths": (1, 1, 2, 1),
        "num_heads": (1, 2, 4, 8),
        "window_size": 4,
    },
    "mlp_mixer.MlpMixer": {"img_size": 64, "embed_dim": 48, "num_blocks": 2},
    "metaformer.MetaFormer": {"dims": (16, 32, 48, 64), "depths": (1, 1, 2, 1)},
    "convmixer.ConvMixer": {"dim": 48, "depth": 3},
    "focalnet.FocalNet": {"embed_dim": 24, "depths": (1, 1, 2, 1)},
    "davit_tiny": {"embed_dims": (24, 48, 96, 192), "depths": (1, 1, 1, 1), "num_heads": (1, 2, 4, 8)},
}
"""What ``timm.create_model`` is given, or a class of ``timm.models``; ``pixels`` of a side are 64 by default."""
TORCHVISION: dict[str, int] = {
    "densenet121": 32, "efficientnet_b0": 32, "googlenet": 64, "mnasnet0_5": 32, "mobilenet_v2": 32, "resnet18": 32,
    "mobilenet_v3_small": 32, "regnet_y_400mf": 32, "shufflenet_v2_x0_5": 32, "squeezenet1_1": 64,
}  # fmt: skip
"""Classifiers by the pixels of a side."""


def models() -> Iterator[Model]:
    """All of the libraries that are installed."""
    declare_operators_of_torchvision()
    for library, of_library in LIBRARIES.items():
        try:
            importlib.import_module(library)
        except ImportError:
            continue
        yield from of_library()


def declare_operators_of_torchvision() -> None:
    """torchvision built for another torch than the one installed cannot be imported, for want of two operators.

    Only detection runs them: non-maximum suppression is written here in plain torch.
    """
    if importlib.util.find_spec("torchvision") is None or _kept:
        return
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]  # half imported
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _kept.append(library)


_kept: list[Any] = []


def _classifier(make: Callable[[], nn.Module], pixels: int) -> tuple[nn.Module, Any]:
    draw = torch.Generator().manual_seed(3)
    images = torch.randn(SAMPLES, 3, pixels, pixels, generator=draw)
    return without_repeats(make()), (images, torch.randint(0, CLASSES, (SAMPLES,), generator=draw))


def without_repeats(model: nn.Module) -> nn.Module:
    """Chains of three and more blocks are shortened: a block that is built as the one before it holds nothing new."""

    def built_as(block: nn.Module) -> tuple[Any, ...]:
        return *map(type, block.modules()), *(parameter.shape for parameter in block.parameters())

    for chain in model.modules():
        if type(chain).forward is nn.Sequential.forward:
            blocks = list(chain)
            for i in range(len(blocks) - 1, 1, -1):
                if built_as(blocks[i]) == built_as(blocks[i - 1]) and any(True for _ in blocks[i].parameters()):
                    del chain[i]
    return model


def _of_classes(output: Any, targets: torch.Tensor) -> torch.Tensor:
    """Auxiliary heads count too."""
    if hasattr(output, "aux_logits"):
        heads = [output.logits, *[head for head in output[1:] if head is not None]]
        return sum(F.cross_entropy(head, targets) for head in heads)  # type: ignore[return-value]
    if isinstance(output, list | tuple):
        return sum(F.cross_entropy(head, targets) for head in output)  # type: ignore[return-value]
    return F.cross_entropy(output, targets)


def of_timm() -> Iterator[Model]:
    for name, options in TIMM.items():
        pixels = options.get("pixels", options.get("img_size", 64))
        given = {key: value for key, value in options.items() if key != "pixels"}
        make = functools.partial(_make_of_timm, name, given)
        yield Model(name, "timm", functools.partial(_classifier, make, pixels), _of_classes)


def _make_of_timm(name: str, given: dict[str, Any]) -> nn.Module:
    import timm

    module, _, class_name = name.rpartition(".")
    if not module:
        return timm.create_model(name, num_classes=CLASSES, **given)
    return getattr(importlib.import_module(f"timm.models.{module}"), class_name)(num_classes=CLASSES, **given)


def of_torchvision() -> Iterator[Model]:
    import torchvision

    for name, pixels in TORCHVISION.items():
        make = functools.partial(getattr(torchvision.models, name), num_classes=CLASSES)
        yield Model(name, "torchvision", functools.partial(_classifier, make, pixels), _of_classes)
    yield Model(
        "lraspp_mobilenet_v3_large",
        "torchvision",
        _segmentation,
        lambda output, targets: F.cross_entropy(output["out"], targets),
    )
    yield Model("RetinaNet", "torchvision", _detection, lambda output, _: sum(output.values()))


def _detection() -> tuple[nn.Module, Any]:
    """Takes a list of images and one of labels, and gives the terms of its loss by name."""
    import torchvision
    from torchvision.models.detection.anchor_utils import AnchorGenerator

    layers = torchvision.models.mobilenet_v2(weights=None, width_mult=0.25).features[:-1]
    layers.out_channels = 80
    anchors = AnchorGenerator(((16, 32),), ((0.5, 1.0),))
    module = torchvision.models.detection.RetinaNet(layers, CLASSES, min_size=64, max_size=64, anchor_generator=anchors)
    draw = torch.Generator().manual_seed(3)
    boxes = torch.tensor([[4.0, 4.0, 30.0, 40.0], [20.0, 10.0, 60.0, 50.0]])
    labels = [{"boxes": boxes[: 1 + i % 2], "labels": torch.arange(1, 2 + i % 2)} for i in range(SAMPLES)]
    return module, ((list(torch.rand(SAMPLES, 3, 64, 64, generator=draw)), labels), None)


def _segmentation() -> tuple[nn.Module, Any]:
    import torchvision

    module = torchvision.models.segmentation.lraspp_mobilenet_v3_large(
        weights=None, weights_backbone=None, num_classes=CLASSES
    )
    draw = torch.Generator().manual_seed(3)
    images = torch.randn(SAMPLES, 3, 32, 32, generator=draw)
    return module, (images, torch.randint(0, CLASSES, (SAMPLES, 32, 32), generator=draw))


class Translation(nn.Module):
    """torch's own encoder and decoder between two tables of words and a head."""

    def __init__(self, words: int = 50, width: int = 32) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(words, width), nn.Embedding(words, width)
        self.core = nn.Transformer(width, 4, 2, 2, 48, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, words)

    def forward(self, source: torch.Tensor, target: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        hidden = self.core(self.source(source), self.target(target), tgt_mask=mask, tgt_is_causal=True)
        return {"loss": F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())}


class Recurrent(nn.Module):
    """A recurrent network of torch over words."""

    def __init__(self, kind: type[nn.Module], words: int = 50, width: int = 32) -> None:
        super().__init__()
        self.table, self.core, self.head = (
            nn.Embedding(words, width),
            kind(width, width, 2, batch_first=True),
            nn.Linear(width, words),
        )

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.core(self.table(words))[0]).transpose(1, 2)


def _translation() -> tuple[nn.Module, Any]:
    draw = torch.Generator().manual_seed(3)
    source, target, labels = (torch.randint(0, 50, (SAMPLES, length), generator=draw) for length in (8, 6, 6))
    return Translation(), {"source": source, "target": target, "labels": labels}


def _recurrent(kind: type[nn.Module]) -> tuple[nn.Module, Any]:
    draw = torch.Generator().manual_seed(3)
    words, wanted = (torch.randint(0, 50, (SAMPLES, 8), generator=draw) for _ in range(2))
    return Recurrent(kind), (words, wanted)


def of_torch() -> Iterator[Model]:
    yield Model("nn.Transformer", "torch", _translation)
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        yield Model(f"nn.{kind.__name__}", "torch", functools.partial(_recurrent, kind), F.cross_entropy)


def of_peft() -> Iterator[Model]:
    from tests.zoo.of_transformers import models as of_transformers

    targets = {"gpt2": ["c_attn"], "llama": ["q_proj", "v_proj"], "bert": ["query", "value"]}
    known = {
        model.name.partition(":")[0]: model for model in reversed(list(of_transformers())) if ":causal" in model.name
    }
    for name, layers in targets.items():
        yield Model(f"{name} with LoRA", "peft", functools.partial(_with_lora, known[name], layers))


def _with_lora(model: Model, layers: list[str]) -> tuple[nn.Module, Any]:
    import peft

    module, batch = model.make()
    config = peft.LoraConfig(r=4, target_modules=layers, lora_dropout=0.0, init_lora_weights=False)
    return peft.get_peft_model(module, config), batch


class Denoiser(nn.Module):
    """A U-Net of diffusers with its usual loss."""

    def __init__(self) -> None:
        super().__init__()
        import diffusers

        self.unet = diffusers.UNet2DModel(
            sample_size=16, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(16, 32),
            norm_num_groups=4, down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        )  # fmt: skip

    def forward(self, images: torch.Tensor, times: torch.Tensor, noise: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": F.mse_loss(self.unet(images, times).sample, noise)}


def _denoiser() -> tuple[nn.Module, Any]:
    draw = torch.Generator().manual_seed(3)
    images, noise = (torch.randn(SAMPLES, 3, 16, 16, generator=draw) for _ in range(2))
    return Denoiser(), {"images": images, "times": torch.randint(0, 1000, (SAMPLES,), generator=draw), "noise": noise}


def of_diffusers() -> Iterator[Model]:
    yield Model("UNet2DModel", "diffusers", _denoiser)


class Sentences(nn.Module):
    """Embeddings of pairs of sentences, pooled as sentence-transformers does, drawn together by their similarity."""

    def __init__(self) -> None:
        super().__init__()
        import transformers
        from sentence_transformers.models import Pooling

        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        self.encoder = transformers.BertModel(transformers.BertConfig(**sizes, vocab_size=50))
        self.pooling = Pooling(32)

    def forward(self, first: torch.Tensor, second: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        one, other = (self._embed(words) for words in (first, second))
        return {"loss": F.mse_loss(F.cosine_similarity(one, other), labels)}

    def _embed(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.encoder(words).last_hidden_state
        mask = (words > 3).long()
        return self.pooling({"token_embeddings": hidden, "attention_mask": mask})["sentence_embedding"]


def _sentences() -> tuple[nn.Module, Any]:
    draw = torch.Generator().manual_seed(3)
    first, second = (torch.randint(0, 50, (SAMPLES, 8), generator=draw) for _ in range(2))
    return Sentences(), {"first": first, "second": second, "labels": torch.rand(SAMPLES, generator=draw)}


def of_sentence_transformers() -> Iterator[Model]:
    yield Model("BertModel with Pooling", "sentence_transformers", _sentences)


LIBRARIES: dict[str, Callable[[], Iterator[Model]]] = {
    "torch": of_torch,
    "timm": of_timm,
    "torchvision": of_torchvision,
    "peft": of_peft,
    "diffusers": of_diffusers,
    "sentence_transformers": of_sentence_transformers,
}
