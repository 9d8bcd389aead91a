"""Every door to a fit, every solver, every head: the same state."""

import json

import numpy as np
import pytest
import torch
from torch import nn

import torchgmc as gmc
from gmctest import cli_files
from gmctest.heads_zoo import ZOO, Entry

SOLVERS = {
    "exact": {},
    "paper": {"solver": "paper", "max_iter": 25},
    "paper, own step": {"solver": "paper", "eta": 0.01, "max_iter": 25},
    "fresh": {"solver": "fresh", "max_iter": 4},
    "fresh, own step": {"solver": "fresh", "eta": 0.01, "max_iter": 4},
    "fresh, own number of steps": {"solver": "fresh"},
}


def state(head: gmc.Head) -> dict[str, torch.Tensor]:
    assert head.is_fitted and head.report is not None
    return head.state_dict()


def same(found: gmc.Head, want: gmc.Head, atol: float = 1e-9) -> None:
    one, two = state(found), state(want)
    assert list(one) == list(two)
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}")
    assert found.report.iterations == want.report.iterations


@pytest.mark.parametrize("options", SOLVERS.values(), ids=SOLVERS)
@pytest.mark.parametrize("entry", ZOO, ids=lambda e: e.name)
def test_fit_and_fit_batches(entry: Entry, options):
    data = entry.data(200, 3).observe
    if entry.make().alpha is None and "solver" in options:
        with pytest.raises(ValueError, match="fits to `alpha`, but this head was made with alpha=None"):
            entry.make().fit(*data, **options)
        return
    whole = entry.make().fit(*data, **options)
    names = whole.arguments
    parts = list(zip(*(t.split(61) for t in data), strict=True))
    same(entry.make().fit_batches(parts, **options), whole)
    same(entry.make().fit_batches((dict(zip(names, part, strict=False)) for part in parts), **options), whole)
    same(entry.make().fit(**dict(zip(names, data, strict=False)), **options), whole)
    again = entry.fitted()  # a fit forgets the one before
    same(again.fit_batches(reversed(parts), **options), whole, 1e-5)  # sums in another order


class Identity:
    """A loader's batch goes through a model that changes nothing."""

    @staticmethod
    def module():
        pl = pytest.importorskip("lightning.pytorch")

        class Module(pl.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.zeros(()))

            def forward(self, x):
                return x

            def training_step(self, batch, index):
                return self.weight.square()

            def validation_step(self, batch, index):
                self(batch["x"])

            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), 0.1)

        return Module()


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*does not have many workers", "ignore:.*training data")
@pytest.mark.parametrize("options", [SOLVERS[k] for k in ("exact", "paper, own step", "fresh, own step")], ids=str)
@pytest.mark.parametrize("entry", ZOO, ids=lambda e: e.name)
def test_lightning(entry: Entry, options, tmp_path):
    pl = pytest.importorskip("lightning.pytorch")
    data = entry.data(60, 3).observe
    head = entry.make()
    if head.alpha is None and "solver" in options:
        with pytest.raises(ValueError, match="fits to `alpha`, but this head was made with alpha=None"):
            gmc.lightning.CalibrationCallback(head, None, **options)
        return
    bound = head.bind(*data)
    batch = {"x": bound[head.arguments[0]]}
    if head.truth:
        batch["target"] = bound[head.truth]
    if head.member_argument in bound:
        batch["groups"] = bound[head.member_argument]
    rows = [{key: value[i] for key, value in batch.items()} for i in range(60)]
    loader = torch.utils.data.DataLoader(rows, batch_size=23)
    adapter = gmc.Adapter(inputs="x", conformity=(lambda output, target: output) if head.takes == "groups" else None)
    callback = gmc.lightning.CalibrationCallback(head, loader, adapter=adapter, monitor=True, **options)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(
        max_epochs=1, accelerator="cpu", default_root_dir=tmp_path, callbacks=[callback], limit_train_batches=1, **quiet
    )
    trainer.fit(Identity.module(), loader, loader)
    same(callback.head, entry.make().fit(*data, **options))
    assert trainer.callback_metrics["calibration/worst"].isfinite()


@pytest.mark.parametrize("options", SOLVERS.values(), ids=SOLVERS)
@pytest.mark.parametrize("name", cli_files.CASES)
def test_command_line(name, options, tmp_path, capsys):
    pytest.importorskip("typer")
    case, n = cli_files.CASES[name], cli_files.N
    arrays = case.data(n, 0)
    groups = cli_files.groups(arrays)
    cli_files.side_files(tmp_path)
    words = [word for key, value in options.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    line = [*cli_files.command(name, tmp_path, case.words), *words, "--groups", "sex,site", "--chunk", "61", "--json"]
    code, found = cli_files.calibrated(tmp_path, arrays, *line)
    want = case.make(list(groups.names)).fit(*cli_files.tensors(arrays, case.observe), groups.membership, **options)
    assert code == 0 and json.loads(capsys.readouterr().out)["fit"]["iterations"] == want.report.iterations
    found.report = want.report  # a file holds the state
    same(found, want)
    assert found.config() == want.config()
    assert found.transform({key: arrays[key] for key in ("sex", "site")}).equal(groups.membership)


def test_every_task_has_a_case():
    from torchgmc.deploy.io import known_heads

    kinds = [kind for kind in known_heads().values() if kind.__module__.startswith("torchgmc.")]
    assert {kind.task.name for kind in kinds if kind.task is not None} == set(cli_files.CASES)


@pytest.mark.parametrize("geometry", ["kl", "euclidean"])
@pytest.mark.parametrize("options", SOLVERS.values(), ids=SOLVERS)
def test_text_helper(options, geometry):
    pytest.importorskip("transformers")
    from gmctest.bert import masked_lm

    model, tokenizer = masked_lm()
    sentences = [f"{who} is a [MASK] ." for who in ("she", "he") for _ in range(20)]
    groups = gmc.TokenGroups(tokenizer, {"female": ["she"], "male": ["he"]})
    lists = {"x": [7, 8, 9], "y": [9, 12]}
    batches = list(gmc.text.masked_logits(model, tokenizer, sentences, batch_size=8))
    want = gmc.DistributionHead(lists, 0.001, groups.names, geometry=geometry)
    want.fit_batches([(b.logits, groups(b.input_ids)) for b in batches], **options)
    head = gmc.DistributionHead(lists, 0.001, groups.names, geometry=geometry)
    same(gmc.text.calibrate_masked_lm(model, tokenizer, sentences, head, groups, batch_size=8, progress=False, **options), want)
    before = {name: value.clone() for name, value in head.state_dict().items()}
    with pytest.raises(ValueError):  # an error leaves the fitted head as it was
        gmc.text.calibrate_masked_lm(model, tokenizer, ["no mask here ."], head, groups, progress=False)
    assert all(torch.equal(value, before[name]) for name, value in head.state_dict().items()) and head.is_fitted


def test_options_are_refused_before_anything_is_done():
    head = ZOO[0].fitted()
    want = {name: value.clone() for name, value in head.state_dict().items()}

    def batches():
        raise AssertionError("the options are wrong: no batch is to be asked for")
        yield

    for options in ({"solver": "newton"}, {"eta": 0.1}, {"solver": "paper", "max_iter": 0}):
        with pytest.raises(ValueError):
            head.fit_batches(batches(), **options)
    with pytest.raises(TypeError, match="batch 1 of `batches` must be a tuple of scores, masks, groups, weight"):
        head.fit_batches([ZOO[0].data(5, 0).observe, "ab"])
    with pytest.raises(TypeError, match="`mask` is unknown: a batch of a ThresholdHead is `scores`, `masks`"):
        head.fit_batches([{"scores": torch.rand(2, 3), "mask": torch.ones(2, 3)}])
    assert all(torch.equal(value, want[name]) for name, value in head.state_dict().items()) and head.is_fitted


@pytest.mark.parametrize("kind", ["numpy", "pandas"])
@pytest.mark.parametrize("entry", ZOO, ids=lambda e: e.name)
def test_arrays_and_columns_are_as_good_as_tensors(entry, kind):
    """One-dimensional ones as a Series; of more dimensions as an array."""
    column = np.asarray if kind == "numpy" else pytest.importorskip(kind).Series

    def given(values):
        return [column(v.numpy()) if v.dim() == 1 else v.numpy() for v in values]

    data, fresh = entry.data(60, 0), entry.data(60, 1)
    want, head = entry.make().fit(*data.observe, **entry.options), entry.make().fit(*given(data.observe), **entry.options)
    same(head, want)
    head.observe(*given(data.observe))
    assert torch.equal(head(*given(fresh.inputs)), want(*fresh.inputs))
    assert str(head.audit(*given(fresh.observe))) == str(want.audit(*fresh.observe))


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*does not have many workers", "ignore:.*training data")
@pytest.mark.parametrize("source", ["z", "x", None], ids=["a key", "the input's key", "a function"])
def test_lightning_with_learned_groups(source, tmp_path):
    """Features come under a key that the model does not see, or are the model's input."""
    pl = pytest.importorskip("lightning.pytorch")
    torch.manual_seed(0)
    x, z = torch.rand(300, 1), torch.randn(300, 2)
    truth = (x[:, 0] + 0.4 * (z[:, 0] > 0)).clamp(0, 1)
    batch = {"x": x, "z": z, "target": torch.rand(300) < truth}
    loader = torch.utils.data.DataLoader([{key: value[i] for key, value in batch.items()} for i in range(300)], batch_size=90)

    def make() -> gmc.ProbabilityHead:
        return gmc.ProbabilityHead(0.02, learn=gmc.Trees(depth=1, trees=5))

    module, features = Identity.module(), source or (lambda shown: shown * 1.0)
    module.forward = lambda x: x[:, 0]  # other keys of the batch would be an error
    callback = gmc.lightning.CalibrationCallback(make(), loader, monitor=True, features=features)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(
        max_epochs=1, accelerator="cpu", default_root_dir=tmp_path, callbacks=[callback], limit_train_batches=1, **quiet
    )
    trainer.fit(module, loader, loader)
    want = make().fit(x[:, 0], batch["target"], features=z if source == "z" else x)
    same(callback.head, want)
    more = {} if source is None else {"features": batch[source]}
    torch.testing.assert_close(module.calibrated(x, **more), want(x[:, 0], features=x if source is None else batch[source]))


@pytest.mark.parametrize("kind", ["pandas", "polars"])
def test_frames_of_numbers_are_matrices_and_frames_of_groups_are_columns(kind):
    """Of one call both: probabilities as a frame, groups as another; and columns where no head is."""
    frame = pytest.importorskip(kind).DataFrame
    g = torch.Generator().manual_seed(0)
    probs, labels = torch.rand(200, 3, generator=g).softmax(1), torch.randint(3, (200,), generator=g)
    table = frame({f"class {k}": probs[:, k].numpy() for k in range(3)})
    people = frame({"age": (torch.arange(200) % 3).numpy()})  # numbers too, and still columns
    y = frame({"y": labels.numpy()})["y"]
    groups = gmc.Groups.from_columns(people)
    head, plain = (gmc.ProbabilityHead(0.01, groups, num_classes=3, bins=None) for _ in range(2))
    head.fit(table, y, people)
    plain.fit(probs, labels, groups.membership)
    assert torch.equal(head(table, people), plain(probs, groups.membership))
    assert torch.equal(head(probs=table, groups=people), head(table, groups))
    assert str(head.audit(table, y, people)) == str(plain.audit(probs, labels, groups.membership))
    sets = gmc.PredictionSets(None, gmc.QuantileHead(0.8, None, groups, finite_sample=True), "lac").fit(table, y, people)
    assert torch.equal(sets(table, people), sets(probs, groups.membership))
    assert sets.measure(table, y, people) == sets.measure(probs, labels, groups)
    first, second = table["class 0"], table["class 1"]
    assert torch.equal(gmc.conformity.absolute_residual(first, second), (probs[:, 1] - probs[:, 0]).abs())
    assert torch.equal(gmc.conformity.interval(first, second)[1], probs[:, 0] + probs[:, 1])
    low, high = gmc.conformity.cqr_interval(first.to_numpy(), second.to_numpy(), first)
    assert torch.equal(torch.stack([low, high]), torch.stack([probs[:, 0] - probs[:, 0], probs[:, 1] + probs[:, 0]]))
    assert torch.equal(gmc.conformity.lac(table, y), gmc.conformity.lac(probs, labels))
    assert torch.equal(gmc.violations(groups, first), gmc.violations(groups, probs[:, 0]))
    moved = gmc.solve(first, lambda f: f - 0.5, groups, alpha=0.01)
    assert torch.equal(moved.f, gmc.solve(probs[:, 0], lambda f: f - 0.5, groups, alpha=0.01).f)
