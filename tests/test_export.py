"""Exported files: eager = TorchScript = torch.export = onnxruntime, for every head and for real models."""

import json
import logging
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import torchgmc as gmc
from gmctest.examples import even_and_odd
from gmctest.heads_zoo import ZOO, Entry
from torchgmc import export

pytestmark = pytest.mark.usefixtures("operators_read_once")

#: Runs a TorchScript or torch.export file in a process that refuses to import torchgmc.
RUNNER = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torchgmc":
            raise ImportError("torchgmc is not installed here")
sys.meta_path.insert(0, Block())
try:
    import torchgmc
    sys.exit("torchgmc could be imported")
except ImportError:
    pass
import torch
folder, results = sys.argv[1], []
for kind, file, example in torch.load(folder + "/in.pt"):
    if kind == "onnx":
        import onnxruntime
        session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
        feeds = {i.name: t.numpy() for i, t in zip(session.get_inputs(), example)}
        result = tuple(torch.from_numpy(r) for r in session.run(None, feeds))
    else:
        program = torch.jit.load(file) if kind == "torchscript" else torch.export.load(open(file, "rb")).module()
        result = program(*example)
    results.append(result if isinstance(result, tuple) else (result,))
torch.save(results, folder + "/out.pt")
"""


OPEN = {"torchscript": export.open_torchscript, "torch.export": export._open_export, "onnx": export._open_onnx}


class Same(nn.Module):
    """A model that puts out its input: the head alone is under test."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 1.0


def run_elsewhere(jobs: list[tuple[str, str, tuple[Tensor, ...]]], folder: Path) -> list[tuple[Tensor, ...]]:
    torch.save(jobs, folder / "in.pt")
    command = [sys.executable, "-I", "-c", RUNNER, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return torch.load(folder / "out.pt")


def as_tuple(value):
    return value if isinstance(value, tuple) else (value,)


#: Every step of a fit is in the graph of these heads: few will do.
STEPS = {"distribution-euclidean": 1, "tree": 3, "tree-groups": 3}


def attached(entry: Entry) -> tuple[gmc.CalibratedModel, tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The head behind a model that does nothing, an example to export with, and others to try."""
    if entry.name in STEPS:
        entry = entry._replace(options={"max_iter": STEPS[entry.name]})
    model = gmc.attach(Same(), entry.fitted())
    example, other = entry.data(4, 1).inputs, entry.data(9, 2).inputs
    if model.wants == "groups":  # a quantile head leaves scores alone
        example, other = (torch.rand(4), *example), (torch.rand(9), *other)
    return model, example, other


#: Long to trace, without being another kind of program than the rest.
LONG = ("threshold-jitter", "distribution-euclidean", "tree-groups")


@pytest.mark.parametrize(
    ("entry", "format"),
    [
        pytest.param(e, f, id=f"{e.name}-{f}", marks=[pytest.mark.slow] * (e.name in LONG and f != "torchscript"))
        for e in ZOO
        for f in export.FORMATS
    ],
)
def test_every_head_in_every_format(entry: Entry, format: str, tmp_path: Path):
    model, example, other = attached(entry)
    path = model.export(tmp_path / "model.bin", format=format, example_inputs=example)
    run = OPEN[format](path)
    for inputs in (example, other, tuple(t[:1] for t in other)):
        for want, got in zip(as_tuple(model(*inputs)), as_tuple(run(*inputs)), strict=True):
            torch.testing.assert_close(got, want)
    said = export.metadata(path)
    assert said["alpha"] == model.head.alpha and said["version"] == gmc.__version__ and said["head"] == type(model.head).__name__
    assert said["groups"] == (list(model.head.groups) if model.head.grouped else None) and said["format"] == format
    assert said["target"] == model.head.config().get("target")
    assert [p.name for p in tmp_path.iterdir()] == ["model.bin"]


def test_files_run_without_torchgmc(tmp_path: Path):
    """Every head's TorchScript file, and one of each other format, in one process that cannot import torchgmc."""
    jobs, wanted = [], []
    for entry, format in [(entry, "torchscript") for entry in ZOO] + [(ZOO[0], "torch.export"), (ZOO[0], "onnx")]:
        model, example, other = attached(entry)
        path = model.export(tmp_path / f"{entry.name}.{format}", format=format, example_inputs=example)
        jobs.append((format, str(path), other))
        wanted.append(as_tuple(model(*other)))
    for want, got in zip(wanted, run_elsewhere(jobs, tmp_path), strict=True):
        torch.testing.assert_close(got, want)


def skip_batch_norm(format: str) -> None:
    if format == "onnx" and torch.__version__.startswith("2.6"):
        pytest.skip("torch 2.6 does not understand what newer versions of onnxscript make of batch normalisation")


def unet() -> nn.Module:
    smp = pytest.importorskip("segmentation_models_pytorch")
    return smp.Unet("resnet18", encoder_weights=None, encoder_depth=3, decoder_channels=(16, 8, 8), classes=1).eval()


def fit_on(model: nn.Module, images: Tensor, groups: Tensor, **options) -> gmc.ThresholdHead:
    with torch.no_grad():
        scores = model(images)
    return gmc.ThresholdHead(0.1, 0.05, ["a", "b"], **options).fit(scores, torch.rand(scores.shape) < 0.5, groups)


@pytest.fixture
def pictures() -> tuple[Tensor, Tensor]:
    return torch.rand(12, 3, 32, 32), torch.arange(12)[:, None] % 2 == torch.arange(2)


@pytest.mark.parametrize("format", export.FORMATS)
def test_unet_of_any_batch_and_size(format: str, pictures, tmp_path: Path):
    skip_batch_norm(format)
    net = unet()
    model = gmc.attach(net, fit_on(net, *pictures, logits=True, range=(-4.0, 4.0)))
    path = model.export(tmp_path / "unet.bin", format=format, example_inputs=tuple(t[:1] for t in pictures))
    run = OPEN[format](path)
    larger = torch.rand(5, 3, 64, 32), pictures[1][:5]
    with torch.no_grad():
        assert (run(*larger) != model(*larger)).float().mean() < 1e-3  # a pixel on the threshold may round across


def test_a_model_that_cannot_be_scripted_is_traced_and_said(pictures, tmp_path: Path, caplog):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Conv2d(3, 1, 1)

        def forward(self, x, **_):  # keyword catch-alls do not script
            return self.net(x).sigmoid()

    model = gmc.attach(Odd(), fit_on(Odd(), *pictures))
    with caplog.at_level(logging.INFO, logger="torchgmc.export"):
        path = model.export(tmp_path / "odd.pt", example_inputs=pictures)
    assert "Odd is traced, not scripted" in caplog.text
    with torch.no_grad():
        assert torch.equal(export.open_torchscript(path)(*(t[:3] for t in pictures)), model(*(t[:3] for t in pictures)))


class Branches(nn.Module):
    """What it computes depends on the values of its inputs, of which it takes two; its scores are in a dict."""

    def forward(self, x: Tensor, bias: Tensor) -> dict[str, Tensor]:
        scores = x.mean(1) + bias[:, None, None]
        return {"out": scores if bool(bias.sum() > 0) else -scores}


def test_branches_of_a_scripted_model_stay_and_inputs_have_names(pictures, tmp_path: Path, caplog):
    (x, groups), bias = pictures, torch.linspace(0.1, 0.5, 12)
    net, adapter = Branches(), gmc.Adapter(activation="softmax")
    head = gmc.ThresholdHead(0.1, 0.05, ["a", "b"]).fit(net(x, bias)["out"].softmax(-1), torch.rand(12, 32, 32) < 0.5, groups)
    model = gmc.attach(net, head, adapter=adapter)
    with caplog.at_level(logging.INFO, logger="torchgmc.export"):
        path = model.export(tmp_path / "m.pt", example_inputs=(x, bias, groups))
    assert not caplog.records
    run = export.open_torchscript(path)
    for sign in (1, -1):  # the example was positive
        torch.testing.assert_close(run(x=x, bias=sign * bias, groups=groups), model(x, sign * bias, groups)["out"])
    assert not torch.equal(run(x, bias, groups), run(x, -bias, groups))


def test_a_deprecated_property_that_nobody_asked_for_is_no_warning(pictures, tmp_path: Path):
    """TorchScript reads every property of a module, the deprecated ones of newer versions of its library too."""

    class Aged(nn.Conv2d):
        @property
        def old_name(self) -> bool:
            warnings.warn("`old_name` is deprecated", FutureWarning, stacklevel=2)
            return True

    net = nn.Sequential(Aged(3, 1, 1), nn.Sigmoid())
    model = gmc.attach(net, fit_on(net, *pictures))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.export(tmp_path / "aged.pt", example_inputs=pictures)


def test_training_mode_is_left_as_it_was(pictures, tmp_path: Path):
    net = nn.Sequential(nn.Conv2d(3, 1, 1), nn.BatchNorm2d(1), nn.Dropout(0.5), nn.Sigmoid())
    model = gmc.attach(net, fit_on(net, *pictures)).train()
    net[1].eval()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    model.export(tmp_path / "m.pt", example_inputs=pictures)
    assert model.training and net.training and not net[1].training and net[2].training
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize("format", export.FORMATS)
def test_a_file_that_disagrees_is_removed(format: str, pictures, tmp_path: Path, monkeypatch):
    net = nn.Sequential(nn.Conv2d(3, 1, 1), nn.Sigmoid())
    model = gmc.attach(net, fit_on(net, *pictures))
    reader = {"torchscript": "open_torchscript", "torch.export": "_open_export", "onnx": "_open_onnx"}[format]
    true = getattr(export, reader)
    monkeypatch.setattr(export, reader, lambda path: lambda *example: ~true(path)(*example))
    (tmp_path / "m.bin").write_bytes(b"the old file")
    with pytest.raises(RuntimeError, match="disagrees with the model in .* removed"):
        model.export(tmp_path / "m.bin", format=format, example_inputs=pictures)
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("m.bin", b"the old file")]


def test_a_trace_that_fixes_the_batch_is_refused(pictures, tmp_path: Path):
    class Fixed(nn.Module):
        def forward(self, x, **_):  # traced; 12 is fixed then
            return x.mean(1).reshape(int(x.shape[0]), 32, 32) + torch.zeros(int(x.shape[0]), 1, 1)

    model = gmc.attach(Fixed(), fit_on(Fixed(), *pictures))
    with pytest.raises(RuntimeError, match="does not run on 13 examples; it was removed"):
        model.export(tmp_path / "m.pt", example_inputs=pictures)
    assert not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_read_is_not_blamed_on_the_number_of_examples(pictures, tmp_path: Path, monkeypatch):
    def read(path):
        raise OSError("no bfloat16 here")

    net = nn.Sequential(nn.Conv2d(3, 1, 1), nn.Sigmoid())
    monkeypatch.setattr(export, "open_torchscript", read)
    with pytest.raises(RuntimeError, match="the torchscript file cannot be read back; it was removed. no bfloat16 here$"):
        gmc.attach(net, fit_on(net, *pictures)).export(tmp_path / "m.pt", example_inputs=pictures)


def test_errors(pictures, tmp_path: Path):
    net = nn.Sequential(nn.Conv2d(3, 1, 1), nn.Sigmoid())
    model = gmc.attach(net, fit_on(net, *pictures))
    with pytest.raises(ValueError, match="`format` must be one of"):
        model.export(tmp_path / "m", format="coreml", example_inputs=pictures)
    for name, format, own in (("m.onnx", "torchscript", "onnx"), ("m.PT2", "onnx", "torch.export")):  # no reader took such files
        with pytest.raises(ValueError, match=f"is of format '{own}', but '{format}' was asked for"):
            model.export(tmp_path / name, format=format, example_inputs=pictures)
    with pytest.raises(ValueError, match="`example_inputs` is empty"):
        model.export(tmp_path / "m")
    with pytest.raises(ValueError, match="`groups` is missing"):
        model.export(tmp_path / "m", example_inputs=pictures[:1])
    with pytest.raises(ValueError, match="one row per example"):
        model.export(tmp_path / "m", example_inputs=(pictures[0], pictures[1][:3]))
    with pytest.raises(TypeError, match="must come from torchgmc.attach"):
        export.export(net, tmp_path / "m", "onnx", pictures)
    with pytest.raises(RuntimeError, match="not fitted"):
        gmc.attach(net, gmc.ThresholdHead(0.1, 0.1, ["a", "b"])).export(tmp_path / "m", example_inputs=pictures)
    with pytest.raises(FileNotFoundError, match="folder"):
        model.export(tmp_path / "no" / "m", example_inputs=pictures)
    (tmp_path / "junk").write_text(json.dumps({}))
    with pytest.raises(ValueError, match="no metadata"):
        export.metadata(tmp_path / "junk")


@pytest.mark.parametrize("format", export.FORMATS)
@pytest.mark.parametrize("kind", ["masked", "causal"])
def test_language_models(kind: str, format: str, tmp_path: Path):
    """Ids, attention and groups in; logits with the calibrated distribution in its place out, for texts of any length."""
    from gmctest.lightning_models import language_model

    net = language_model(kind).eval()
    adapter = gmc.Adapter(mask_token_id=4) if kind == "masked" else gmc.Adapter(position="last")
    head = gmc.DistributionHead({"jobs": [10, 11]}, 1e-4, ["a", "b"])
    head.fit(torch.randn(40, 50), torch.arange(40)[:, None] % 2 == torch.arange(2))
    model = gmc.attach(net, head, adapter=adapter)

    def texts(n: int, length: int) -> dict[str, Tensor]:
        ids = torch.randint(5, 50, (n, length))
        ids[torch.arange(n), torch.arange(n) % length] = 4
        seen = torch.ones_like(ids)
        seen[0, -1] = 0
        groups = torch.arange(n)[:, None] % 2 == torch.arange(2)
        return {"input_ids": ids, "attention_mask": seen, "groups": groups}

    path = model.export(tmp_path / "lm.bin", format=format, example_inputs=texts(3, 6))
    run = OPEN[format](path)
    other = texts(5, 9)
    with torch.no_grad():
        want = model(**other).logits
        torch.testing.assert_close(run(*other.values()), want, rtol=1e-4, atol=1e-5)
    assert export.metadata(path)["inputs"] == ["input_ids", "attention_mask", "groups"]


class Bright(nn.Module):
    """Groups computed from the image."""

    def forward(self, x: Tensor) -> Tensor:
        bright = x.flatten(1).mean(1) > 0.5
        return torch.stack([bright, ~bright], 1)


@pytest.mark.parametrize("format", export.FORMATS)
def test_groups_computed_inside_the_file(format: str, pictures, tmp_path: Path):
    net = nn.Sequential(nn.Conv2d(3, 1, 1), nn.Sigmoid())
    model = gmc.attach(net, fit_on(net, *pictures), groups=Bright())
    path = model.export(tmp_path / "m.bin", format=format, example_inputs=pictures[:1])
    run = OPEN[format](path)
    with torch.no_grad():
        assert (run(pictures[0][:5]) != model(pictures[0][:5])).float().mean() < 1e-3


class Backbone(nn.Module):
    """As little as torchvision's segmentation heads need: features of two sizes by name."""

    def __init__(self):
        super().__init__()
        self.low, self.high = nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.Conv2d(8, 16, 3, stride=2, padding=1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        low = self.low(x).relu()
        return {"low": low, "high": self.high(low).relu()}


@pytest.mark.parametrize("format", export.FORMATS)
def test_torchvision_segmentation(format: str, pictures, tmp_path: Path):
    skip_batch_norm(format)
    """A dict comes out of the model; the exported file gives the mask itself."""
    models = pytest.importorskip("torchvision.models.segmentation")
    if format == "torchscript":
        net = models.lraspp_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=2).eval()
    else:  # the same kind of model, quick to trace
        net = models.LRASPP(Backbone(), low_channels=8, high_channels=16, num_classes=2).eval()
    head = gmc.ThresholdHead(0.1, 0.5, ["a", "b"]).fit(torch.rand(12, 9), torch.rand(12, 9) < 0.5, pictures[1])
    model = gmc.attach(net, head, adapter=gmc.Adapter(channel=1))
    example = tuple(t[:2] for t in pictures)
    path = model.export(tmp_path / "m.bin", format=format, example_inputs=example)
    run = OPEN[format](path)
    with torch.no_grad():
        assert (run(*(t[:3] for t in pictures)) != model(*(t[:3] for t in pictures))["out"]).float().mean() < 1e-2


@pytest.mark.parametrize("format", export.FORMATS)
def test_no_example_stays_in_the_file(format: str, pictures, tmp_path: Path):
    """Example inputs are somebody's data, and a slice drags the whole data set along."""
    images, groups = pictures
    many = torch.cat([torch.full((2, *images.shape[1:]), 0.7310585), torch.rand(2000, *images.shape[1:])])
    net = nn.Sequential(nn.Conv2d(3, 1, 1), nn.Sigmoid())
    model = gmc.attach(net, fit_on(net, images, groups))
    path = model.export(tmp_path / "model", format, (many[:2], groups[:2]))
    assert path.stat().st_size < many.element_size() * many.numel() / 10
    assert many[0, 0, 0, :8].numpy().tobytes() not in path.read_bytes()
    if format == "torch.export":
        kept, _ = torch.export.load(str(path.rename(tmp_path / "model.pt2"))).example_inputs
        assert not any(t.any() for t in kept)


def test_a_cut_table_is_an_example_like_any_other(tmp_path):
    (head, who), net = even_and_odd(), torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Sigmoid())
    x = torch.rand(6, 8, 9)[..., :-1]  # not contiguous
    path = gmc.attach(net, head).export(tmp_path / "m.pt2", "torch.export", (x, who[:6]))
    assert torch.export.load(path).module()(torch.rand(11, 8, 8), who[:11]).shape == (11, 8, 8)


def test_an_onnx_file_names_its_outputs(tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    (head, who), net = even_and_odd(), torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Sigmoid())
    path = gmc.attach(net, head).export(tmp_path / "m.onnx", "onnx", (torch.rand(6, 8, 8), who[:6]))
    assert [one.name for one in runtime.InferenceSession(str(path)).get_outputs()] == ["output"]


def test_a_head_alone_is_exported_by_the_command():
    with pytest.raises(TypeError, match=r"got ThresholdHead \(for a head without a model: gmc.save it, then `torchgmc export`\)"):
        gmc.export.export(even_and_odd()[0], "x.pt")
