"""Nothing wrong in silence, over every head: memberships by name and of 0 and 1 at every door, threads, states, full disks."""

import copy
import math
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import torchgmc as gmc
from gmctest import cli_files, subprocess_env
from gmctest.heads_zoo import ZOO, Entry

GROUPED = [entry for entry in ZOO if entry.make().needs_groups]
EVERY = pytest.mark.parametrize("entry", ZOO, ids=lambda e: e.name)


def doors(entry: Entry) -> Iterator[tuple[str, object]]:
    """Everything that takes a membership, as functions of it."""
    head, data = entry.fitted(), entry.data(40, 1)
    rest, truth = data.inputs[:-1], data.observe[:-1]
    model = gmc.attach(nn.Identity(), head, adapter=gmc.Adapter(activation="none"))
    first = rest[0] if rest else torch.rand(40)
    yield "forward", lambda groups: head(*rest, groups)
    yield "attach", lambda groups: model(first, groups)
    yield "attach, by key", lambda groups: model(first, groups=groups)
    yield "observe", lambda groups: entry.make().observe(*truth, groups)
    yield "fit", lambda groups: entry.make().fit(*truth, groups)
    yield "audit", lambda groups: head.audit(*truth, groups)
    yield "values", lambda groups: head.values(*truth, groups)
    yield "metric", lambda groups: gmc.metrics.for_head(head).update(*truth, groups)
    yield "penalty", lambda groups: gmc.GMCPenalty.for_head(head)(*truth, groups)
    if head.s_range() is not None:
        yield "monitor", lambda groups: gmc.Monitor(head, alpha=0.5).update(*truth, groups)
    yield "func", lambda groups: gmc.func.apply([head, head], *rest, groups)
    if isinstance(head, gmc.ThresholdHead):
        yield "threshold", lambda groups: head.threshold(groups)
    if isinstance(head, gmc.TreeHead):
        yield "threshold", lambda groups: head.threshold(first, groups)
    if isinstance(head, gmc.QuantileHead):
        yield "covers", lambda groups: head.covers(torch.rand(40), groups)
    if isinstance(head, gmc.DistributionHead):
        yield "adjust", lambda groups: head.adjust(first, groups)
        yield "processor", lambda groups: gmc.text.GMCLogitsProcessor(head, groups)(torch.zeros(40, 1).long(), first)
        yield "apply_to_output", lambda groups: gmc.text.apply_to_output(first[:, None], head, groups)


@pytest.mark.parametrize("entry", GROUPED, ids=lambda e: e.name)
def test_every_door_compares_names_and_refuses_what_is_not_0_or_1(entry: Entry) -> None:
    member = entry.data(40, 1).inputs[-1]
    columns = {"z": [f"u{i % member.shape[1]}" for i in range(40)]}
    strangers = gmc.Groups.from_columns(columns)  # as many, other names
    assert len(strangers) == member.shape[1]
    for name, door in doors(entry):
        door(member)
        with pytest.raises(ValueError, match=r"must be the groups the head was made for"):
            door(strangers)
            pytest.fail(name)
        half = member.double()
        half[3, 0] = 0.5
        missing = member.double()
        missing[3, 0] = math.nan
        for wrong in (member.to(torch.uint8) * 255, member.long() * 2, half, missing):
            with pytest.raises(ValueError, match=r"`(groups|x)` must hold memberships"):
                door(wrong)
                pytest.fail(name)


def test_groups_by_name_are_the_easy_way_everywhere() -> None:
    """Columns in another order give the same answers; a frame of columns will do."""
    n = 200
    columns = {"sex": ["f", "m"] * (n // 2), "site": ["a", "a", "b", "c"] * (n // 4)}
    groups = gmc.Groups.from_columns(columns)
    masks = torch.rand(n, 6, 6, generator=torch.Generator().manual_seed(0)) < 0.4
    scores = torch.sigmoid(2.0 * masks - 1.0 - 0.8 * groups.membership[:, :1, None])
    head = gmc.ThresholdHead(0.1, 0.02, groups).fit(scores, masks, groups)
    model = gmc.attach(nn.Identity(), head, adapter=gmc.Adapter(activation="none"))
    want = head(scores, groups.membership)
    turned = dict(reversed(columns.items()))
    for door in (head, model):
        for who in (groups, columns, turned, groups.membership.numpy()):
            assert torch.equal(door(scores, who), want)
        with pytest.raises(ValueError, match="another order"):
            door(scores, gmc.Groups.from_columns(turned))
    assert torch.equal(head.threshold(groups), head.threshold(groups.membership))


@EVERY
def test_nan_and_numbers_out_of_range_are_no_answer(entry: Entry) -> None:
    head, inputs = entry.fitted(), entry.data(12, 1).inputs
    if head.takes == "groups":
        return
    model = gmc.attach(nn.Identity(), head, adapter=gmc.Adapter(activation="none"))
    model(*inputs)
    broken = inputs[0].clone()
    broken.view(-1)[7] = math.nan
    far = inputs[0] + 5.0
    for door in (head, model):
        with pytest.raises(ValueError, match="NaN"):
            door(broken, *inputs[1:])
        if head.takes == "probs":
            with pytest.raises(ValueError, match=r"\[0, 1\]"):
                door(far, *inputs[1:])


# -- threads ------------------------------------------------------------------------------------------------------------------


@EVERY
def test_observe_from_many_threads_loses_nothing(entry: Entry) -> None:
    data, head = entry.data(96, 0).observe, entry.make()
    head.prepare("exact", None, None)

    def work(k: int) -> None:
        for i in range(k, 96, 8):
            head.observe(*(part[i : i + 1] for part in data))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    head.calibrate()
    assert head.report is None or head.report.details.get("examples", 96) == 96
    whole = entry.make().fit(*data)
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(head.state_dict()[name], value, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["threshold", "probability-bins", "quantile-bins", "distribution-euclidean", "tree", "gmc"])
def test_answers_during_a_fit_are_of_the_old_state_or_the_new(name: str) -> None:
    entry = next(entry for entry in ZOO if entry.name == name)
    head, inputs = entry.fitted(80, 0), entry.data(30, 5).inputs
    fits = [entry.data(80, seed).observe for seed in (0, 1)]
    want = [entry.make().fit(*data)(*inputs) for data in fits]
    found, errors, done = [], [], threading.Event()

    def ask() -> None:
        while not done.is_set():
            try:
                found.append(head(*inputs))
            except Exception as error:
                errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    for turn in range(6):
        head.fit(*fits[turn % 2])
    done.set()
    thread.join()
    assert not errors and found
    assert all(any(torch.equal(one, two) for two in want) for one in found)


def test_a_batch_observed_while_another_thread_calibrates_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    head = gmc.QuantileHead(0.8, 0.02)
    head.observe(torch.rand(50))
    twin = gmc.QuantileHead.twin
    late = gmc.QuantileHead.mark_fitted

    def marked(self: gmc.QuantileHead, *args: object, **kwargs: object) -> None:
        late(self, *args, **kwargs)
        head.observe(torch.rand(7))  # as another thread would

    monkeypatch.setattr(gmc.QuantileHead, "twin", twin)
    monkeypatch.setattr(gmc.QuantileHead, "mark_fitted", marked)
    head.calibrate()
    assert head.statistics.rows == 57


# -- states -------------------------------------------------------------------------------------------------------------------


@EVERY
@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_state_that_is_not_finite_is_not_loaded_audited_or_saved(entry: Entry, number: float, tmp_path: Path) -> None:
    head = entry.fitted()
    for name, value in head.state_dict().items():
        if not value.is_floating_point() or not value.numel() or (name in head.unbounded and number == math.inf):
            continue
        broken = copy.deepcopy(head)
        getattr(broken, name).view(-1)[0] = number
        whole, other = copy.deepcopy(head), broken.state_dict()
        with pytest.raises(RuntimeError, match="not finite"):
            whole.load_state_dict(other)
        with pytest.raises(RuntimeError, match="size mismatch"):
            whole.load_state_dict(head.state_dict() | {name: value[..., None].expand(*value.shape, 2)})
        assert whole.same_state(head)  # a state that is refused changes nothing
        with pytest.raises(ValueError, match="not finite"):
            broken.audit(*entry.data(40, 1).observe)
        if head.s_range() is not None:
            with pytest.raises(ValueError, match="not finite"):
                gmc.Monitor(broken, alpha=0.5)
        with pytest.raises(ValueError, match="not finite"):
            gmc.save(broken, tmp_path / "head.safetensors")
    assert not list(tmp_path.iterdir())


PAIRS = {
    "groups": (lambda g: gmc.ThresholdHead(0.1, 0.02, g), ["a", "b"], ["b", "a"]),
    "risk": (lambda r: gmc.ThresholdHead(0.1, 0.02, ["a"], risk=r), "fnr", "fpr"),
    "target": (lambda t: gmc.ThresholdHead(t, 0.02, ["a"]), 0.1, 0.2),
    "logits": (lambda x: gmc.ThresholdHead(0.1, 0.02, ["a"], logits=x), True, False),
    "attributes": (lambda x: gmc.DistributionHead(x, 0.02, ["a"]), {"x": [1], "y": [2]}, {"y": [2], "x": [1]}),
    "geometry": (lambda x: gmc.ProbabilityHead(0.02, ["a"], geometry=x), "kl", "euclidean"),
    "names": (lambda x: gmc.TreeHead(x, 0.9, 0.02), {"x": ["a", "b"], "y": ["c"]}, {"x": ["b", "a"], "y": ["c"]}),
}


@pytest.mark.parametrize("option", PAIRS)
def test_a_state_dict_belongs_to_heads_that_mean_the_same_by_it(option: str) -> None:
    make, one, two = PAIRS[option]
    state = make(one).state_dict()
    make(one).load_state_dict(state)
    with pytest.raises(RuntimeError, match=f"it belongs to a head with {option}"):
        make(two).load_state_dict(state)
    plain = gmc.Adapter(activation="none")
    with pytest.raises(RuntimeError, match=f"the state of 'head' cannot be loaded: it belongs to a head with {option}"):
        model = gmc.attach(nn.Identity(), make(one), adapter=plain)
        gmc.attach(nn.Identity(), make(two), adapter=plain).load_state_dict(model.state_dict())


def test_word_lists_keep_their_order_in_a_file(tmp_path: Path) -> None:
    entry = next(entry for entry in ZOO if entry.name == "distribution")
    data = entry.data(80, 0)
    head = gmc.DistributionHead({"z": [3, 4], "a": [4, 5, 9]}, 0.002, ["a", "b", "c"], noise_floor=False).fit(*data.observe)
    loaded = gmc.load(gmc.save(head, tmp_path / "head.safetensors"))
    assert list(loaded.attributes) == ["z", "a"] and torch.equal(loaded(*data.inputs), head(*data.inputs))
    other = gmc.DistributionHead({"a": [4, 5, 9], "z": [3, 4]}, 0.002, ["a", "b", "c"]).fit(*data.observe)
    with pytest.raises(ValueError, match="different `attributes`"):
        gmc.func.stack([head, other])
    assert gmc.distributed.signature(head) != gmc.distributed.signature(other)


@EVERY
def test_a_head_made_in_inference_mode_can_be_fitted_again(entry: Entry) -> None:
    data = entry.data(80, 0)
    with torch.inference_mode():
        head = entry.make()
        fitted = entry.fitted()
    for one in (head, fitted):
        one.fit(*data.observe)
        one.reset()
        one.observe(*data.observe)
        one.calibrate()
    assert torch.equal(torch.as_tensor(head(*data.inputs)), torch.as_tensor(fitted(*data.inputs)))


# -- a full disk --------------------------------------------------------------------------------------------------------------

FULL = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), int(sys.argv[1])))
sys.dont_write_bytecode = True
from torchgmc.cli import main
for line in sys.argv[2:]:
    print(main(line.split("|")), flush=True)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGXFSZ"), reason="limits of files are POSIX")
def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    pytest.importorskip("typer")
    data = cli_files.write(tmp_path / "d.npz", cli_files.images(60, 0))
    code, _ = cli_files.calibrated(tmp_path, cli_files.images(60, 0), *cli_files.FNR, "--groups", "sex")
    assert code == 0
    head, out = tmp_path / "h.safetensors", tmp_path / "out"
    lines = [
        f"calibrate|fnr|{data}|--target|0.1|--alpha|0.02|--groups|sex|--out|{out}.safetensors",
        f"export|{head}|--out|{out}.pt",
        f"export|{head}|--format|torch.export|--out|{out}.pt2",
        f"apply|{head}|{data}|--out|{out}.npz",
        f"apply|{head}|{data}|--out|{out}.csv",
        f"audit|{head}|{data}|--report|{out}.html",
    ]
    if _has("onnxscript") and _has("onnxruntime"):
        lines.append(f"export|{head}|--format|onnx|--out|{out}.onnx")
    before = sorted(tmp_path.iterdir())
    words = [sys.executable, "-W", "ignore", "-c", FULL, "200", *lines]
    found = subprocess.run(words, capture_output=True, text=True, timeout=300, env=subprocess_env(), cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    assert found.stdout.split() == ["2"] * len(lines), found.stdout + found.stderr
    told = [line for line in found.stderr.splitlines() if "warning" not in line]
    assert len(told) == len(lines), found.stderr
    assert all(line.startswith("torchgmc: [Errno 27] File too large: '") for line in told), found.stderr
    assert sorted(tmp_path.iterdir()) == before


def _has(package: str) -> bool:
    try:
        __import__(package)
    except ImportError:
        return False
    return True
