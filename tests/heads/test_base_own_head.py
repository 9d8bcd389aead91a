"""A head written outside the package is a full citizen: everything that follows from the contract works for it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import torchgmc as gmc
from gmctest.own_head import MeanHead

NAMES = ["a", "b"]


def data(n: int = 400, seed: int = 0):
    g = torch.Generator().manual_seed(seed)
    groups = torch.rand(n, 2, generator=g) < 0.5
    scores = torch.randn(n, generator=g)
    return scores, scores - 0.3 * groups[:, 0] + 0.2 * groups[:, 1] + 0.1 * torch.randn(n, generator=g), groups


def fitted() -> MeanHead:
    return MeanHead(0.01, NAMES).fit(*data())


def test_fit_and_fit_batches_agree_and_a_failed_fit_changes_nothing():
    head = fitted()
    assert head.report.converged and float(head.report.violations_before.abs().max()) > 0.05
    other = MeanHead(0.01, NAMES).fit_batches(zip(*(t.split(70) for t in data()), strict=True))
    torch.testing.assert_close(other.offsets, head.offsets)
    before = head.offsets.clone()
    with pytest.raises(TypeError, match="`y` is missing: a batch of a MeanHead is `scores`, `y`, `groups`, `weight`"):
        head.fit(torch.rand(3))
    assert torch.equal(head.offsets, before) and head.is_fitted


def test_a_buffer_that_is_not_there_yet_does_not_stop_a_state():
    head, other = fitted(), MeanHead(0.01, NAMES)
    for one in (head, other):
        one.register_buffer("later", None)
    other.load_state_dict(head.state_dict())
    assert other.is_fitted and torch.equal(other.offsets, head.offsets)


def test_audit_and_report(tmp_path):
    head = fitted()
    audit = head.audit(*data(seed=1))
    residual = head(*data(seed=1)[::2]) - data(seed=1)[1]
    table = dict(zip(audit.table["group"], audit.table["estimate"], strict=True))
    for name, column in zip(NAMES, data(seed=1)[2].T, strict=True):
        assert table[name] == pytest.approx(float((residual * column).double().mean()), abs=1e-6)
    assert "guide, not a guarantee" in audit.note  # no s_range was given
    page = audit.to_html(tmp_path / "audit.html", head=head).read_text()
    assert "MeanHead" in page and audit.certificate in page
    with pytest.warns(UserWarning, match="also used to calibrate"):
        head.audit(*data())


def test_metrics_and_penalty():
    pytest.importorskip("torchmetrics")
    head = fitted()
    metric = gmc.metrics.for_head(head)
    metric.update(*data(seed=1))
    assert float(metric.compute()) == pytest.approx(head.audit(*data(seed=1)).max_violation, abs=1e-6)
    scores, y, groups = data()
    scores.requires_grad_()
    penalty = gmc.GMCPenalty.for_head(MeanHead(0.01, NAMES), kind="squared")
    penalty(scores, y, groups).backward()
    assert bool((scores.grad != 0).any())
    torch.testing.assert_close(penalty.violations(), head.report.violations_before, atol=1e-6, rtol=0)


def test_files_name_the_class_by_its_module(tmp_path):
    head = fitted()
    path = gmc.save(head, tmp_path / "own.safetensors")
    again = gmc.load(path)
    assert type(again) is MeanHead and torch.equal(again.offsets, head.offsets)
    code = f"import torchgmc as gmc; gmc.load({str(path)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode and "import gmctest.own_head first" in done.stderr


def test_a_class_with_the_name_of_one_of_ours_is_not_taken_for_it(tmp_path):
    class TreeHead(MeanHead):
        pass

    head = TreeHead(0.01, NAMES).fit(*data())
    assert gmc.metrics.for_head(head).names == NAMES
    gmc.GMCPenalty.for_head(head)(*data())
    assert type(gmc.load(gmc.save(head, tmp_path / "own.safetensors"))) is TreeHead
    assert gmc.load.__module__ and gmc.TreeHead.kind() == "TreeHead" != TreeHead.kind()


@pytest.mark.parametrize("format", ["torchscript", "torch.export"])
def test_attach_and_export(tmp_path, format):
    head = fitted()
    model = gmc.attach(nn.Sequential(nn.Linear(3, 1), nn.Flatten(0)), head)
    x, groups = torch.rand(6, 3), data()[2][:6]
    want = model(x, groups)
    assert torch.equal(want, head(model.scores(x), groups))
    model.export(tmp_path / "own.pt", format=format, example_inputs=(x, groups))
    assert gmc.export.metadata(tmp_path / "own.pt")["head"].endswith("MeanHead")


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*does not have many workers", "ignore:.*training data")
def test_lightning(tmp_path):
    pl = pytest.importorskip("lightning.pytorch")

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(1, 1)

        def forward(self, x):
            return self.layer(x)[:, 0]

        def training_step(self, batch, index):
            return (self(batch[0]) - batch[1]).square().mean()

        validation_step = training_step

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.01)

    scores, y, groups = data()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(scores[:, None], y, groups), batch_size=100)
    callback = gmc.lightning.CalibrationCallback(MeanHead(0.01, NAMES), loader, monitor=True)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(max_epochs=1, accelerator="cpu", default_root_dir=tmp_path, callbacks=[callback], **quiet)
    trainer.fit(Module(), loader, loader)
    assert callback.head.report.converged and "calibration/worst" in trainer.callback_metrics


def test_the_command_line_says_that_it_cannot(tmp_path, capsys):
    pytest.importorskip("typer")
    from torchgmc.cli import main

    path = gmc.save(fitted(), tmp_path / "own.safetensors")
    import numpy as np

    np.savez(tmp_path / "d.npz", scores=data()[0].numpy())
    assert main(["apply", str(path), str(tmp_path / "d.npz"), "--out", str(tmp_path / "o.npz")]) == 2
    assert "a MeanHead has no command-line task; use it from Python" in capsys.readouterr().err


def test_it_is_short():
    from gmctest import own_head

    lines = [line for line in Path(own_head.__file__).read_text().splitlines() if line.strip()]
    assert len(lines) <= 60
    assert json.dumps(fitted().config())
