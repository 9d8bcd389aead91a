"""notebooks/recipes.md: models of other packages, tiny and not trained, with label maps."""

import re

import pytest
import torch

import torchgmc as gmc
from gmctest import ROOT

PAGE = (ROOT / "notebooks" / "recipes.md").read_text(encoding="utf-8")
RECIPES = {}
for block in re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL):
    exec(compile(block, "recipes.md", "exec"), RECIPES)
GROUPS = ["even", "odd"]
ADAPTER = {"channel": 2, "ignore_index": 255}


def pictures(n=4, size=32, channels=3):
    """Pictures, label maps of three classes with pixels of none, and groups."""
    g = torch.Generator().manual_seed(0)
    labels = torch.randint(3, (n, size, size), generator=g)
    labels[:, :4] = 255
    return torch.randn(n, channels, size, size, generator=g), labels, torch.arange(n)[:, None] % 2 == torch.arange(2)


def calibrated(net, adapter, images, labels, who):
    """Fit on one batch, attach, and check the mask against thresholds by hand; returns the scores that were used."""
    head = gmc.ThresholdHead(0.2, None, GROUPS, resolution="exact")  # scores of an untrained model are all alike
    model = RECIPES["calibrate"](net, adapter, [(images, labels, who)], head)
    with torch.no_grad():
        output = net(images)
        scores, result = model.adapter.scores(output), model(images, who)
    mask = result if isinstance(result, torch.Tensor) else result["calibrated" if "calibrated" in result else "out"]
    assert mask.dtype == torch.bool and torch.equal(mask, scores > head.threshold(who)[:, None, None].to(scores.dtype))
    truth = labels.reshape(scores.shape)
    risk = head.values(scores, truth == 2, who, pixel_weight=truth != 255).s.mean()
    assert abs(float(risk)) < 0.05 or len(scores.unique()) < 100  # an untrained DeepLab is constant
    return scores


@pytest.mark.parametrize("name", ["deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large"])
def test_torchvision_segmentation(name):
    models = pytest.importorskip("torchvision").models.segmentation
    net = getattr(models, name)(weights=None, weights_backbone=None, num_classes=3)
    images, labels, who = pictures()
    scores = calibrated(net, gmc.Adapter(**ADAPTER), images, labels, who)  # "out", softmax and channel are found
    torch.testing.assert_close(scores, net(images)["out"].softmax(1)[:, 2])


def test_torchvision_mask_rcnn():
    detection = pytest.importorskip("torchvision").models.detection
    images, labels, who = pictures(size=32)
    net = detection.maskrcnn_resnet50_fpn(
        weights=None,
        weights_backbone=None,
        num_classes=3,
        min_size=32,
        max_size=32,
        box_score_thresh=0.0,
        box_detections_per_img=5,
    ).eval()
    adapter = RECIPES["Instances"](channel=2)
    head = gmc.ThresholdHead(0.2, None, GROUPS)
    model = gmc.attach(net, head, adapter=adapter)
    with torch.no_grad():
        scores = adapter.scores(net(list(images)))
        head.fit(scores, labels == 2, who, pixel_weight=labels != 255)
        assert torch.equal(model(list(images), groups=who), head(scores, who))


def test_segmentation_models_pytorch():
    smp = pytest.importorskip("segmentation_models_pytorch")
    net = smp.Unet("resnet18", encoder_weights=None, encoder_depth=3, decoder_channels=(16, 8, 8), classes=3)
    images, labels, who = pictures()
    with pytest.raises(ValueError, match="activation='softmax'"):  # sigmoid or softmax: the model does not say
        gmc.attach(net, gmc.ThresholdHead(0.2, None, GROUPS), adapter=gmc.Adapter(**ADAPTER))
    calibrated(net, gmc.Adapter(activation="softmax", **ADAPTER), images, labels, who)


def test_transformers_segformer():
    transformers = pytest.importorskip("transformers")
    config = transformers.SegformerConfig(
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[8, 16],
        patch_sizes=[7, 3],
        strides=[4, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=16,
        num_labels=3,
    )
    images, labels, who = pictures()
    net = transformers.SegformerForSemanticSegmentation(config)
    calibrated(net, RECIPES["Upsampled"](**ADAPTER), images, labels, who)
    with pytest.raises(ValueError, match=r"\(4, 8, 8\), got \(4, 32, 32\); .*interpolate"):  # says what to do
        calibrated(net, gmc.Adapter(**ADAPTER), images, labels, who)


def test_monai_unet_and_sliding_windows():
    nets = pytest.importorskip("monai.networks.nets")
    net = nets.UNet(spatial_dims=2, in_channels=1, out_channels=3, channels=(4, 8), strides=(2,)).eval()
    images, labels, who = pictures(channels=1)
    adapter = gmc.Adapter(activation="softmax", **ADAPTER)
    calibrated(net, adapter, images, labels[:, None], who)  # MONAI's label maps have a channel

    calibrated(RECIPES["Windows"](net), adapter, images, labels, who)
