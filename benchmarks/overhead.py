"""What a head adds to a forward pass, and what a fit on two processes exchanges.

    python -m benchmarks.overhead            # U-Net resnet18 at 256 x 256; an encoder of MiniLM size with 30,522 tokens
    python -m benchmarks.overhead --small    # small models, to see that it runs

The share is the time of everything `attach` puts behind the model (scores out, head, result back in) over the time of the
whole calibrated forward pass; both are the quickest of several runs that take turns, in one process. `scripted` is the
scripted head in a pass of the file that `model.export` writes. Bytes are those one of two ranks contributes to a fit (gloo,
loopback), headers and padding included.
"""

import argparse
import importlib.util
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed as dist, multiprocessing as mp, nn

import torchgmc as gmc
from benchmarks.rows import Row
from benchmarks.timing import header, quickest
from torchgmc.distributed import exchanged_bytes

GROUPS = ["a", "b", "c", "d"]


def membership(n: int) -> Tensor:
    return torch.arange(n)[:, None] % len(GROUPS) == torch.arange(len(GROUPS))


def unet(size: int, batch: int, encoder: str) -> tuple[nn.Module, gmc.CalibratedModel, tuple[Tensor, ...]]:
    """A U-Net with thresholds for four groups."""
    import segmentation_models_pytorch as smp

    net = smp.Unet(encoder, encoder_weights=None, classes=1).eval()
    images, groups = torch.rand(batch, 3, size, size), membership(batch)
    head = gmc.ThresholdHead(0.1, 0.5, GROUPS, logits=True)
    head.fit(torch.randn(64, 8, 8), torch.rand(64, 8, 8) < 0.5, membership(64))
    return net, gmc.attach(net, head), (images, groups)


def encoder(layers: int, hidden: int, vocabulary: int, batch: int, length: int, masked: bool) -> Any:
    """A masked language model, calibrated only at the mask or at every position."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=12 if hidden % 12 == 0 else 2,
        intermediate_size=4 * hidden,
    )
    net = BertForMaskedLM(config).eval()
    lists = {f"list {k}": list(range(100 * k, 100 * k + 60)) for k in range(1, 3)}
    head = gmc.DistributionHead(lists, 1e-3, GROUPS).fit(torch.randn(64, vocabulary), membership(64))
    ids = torch.randint(1000 if vocabulary > 2000 else 5, vocabulary, (batch, length))
    ids[:, length // 2] = 3
    model = gmc.attach(net, head, adapter=gmc.Adapter(mask_token_id=3) if masked else None)
    return net, model, (ids, membership(batch))


def eager(net: nn.Module, model: gmc.CalibratedModel, inputs: tuple[Tensor, ...], repeat: int) -> tuple[float, float]:
    """Share of the head, and seconds of the calibrated pass."""
    with torch.inference_mode():
        output = net(*inputs[:-1])
        args, _, member = model.divide(inputs, None, {})
        named = {"input_ids": args[0]}

        def head() -> Any:
            return model.adapter.replace(output, model.apply_head(output, member, named))

        whole, alone = quickest(lambda: model(*inputs), head, repeat=repeat)
    return alone / whole, whole


def checking(model: gmc.CalibratedModel, inputs: tuple[Tensor, ...], repeat: int) -> float:
    """Share of the checks of values (scores, and a membership of whole numbers) in the calibrated eager pass."""
    scores, member, head = model.scores(*inputs[:-1]), inputs[-1].long(), model.head
    with torch.inference_mode():

        def checks() -> None:
            head.check_input("scores", scores, member)
            head.check_member(member)

        whole, alone = quickest(lambda: model(*inputs[:-1], member), checks, repeat=repeat)
    return alone / whole


def in_place(net: nn.Module, model: gmc.CalibratedModel, inputs: tuple[Tensor, ...], repeat: int) -> float:
    """Share of `adjust_` on the logits of every position, in the model's pass followed by it."""
    head = model.head
    with torch.inference_mode():
        logits = net(*inputs[:-1]).logits
        want = head(logits, inputs[-1])
        torch.testing.assert_close(head.adjust_(logits.clone(), inputs[-1]).log_softmax(-1), want, rtol=0, atol=1e-4)
        whole, alone = quickest(
            lambda: head.adjust_(net(*inputs[:-1]).logits, inputs[-1]), lambda: head.adjust_(logits, inputs[-1]), repeat=repeat
        )
    return alone / whole


def positions(widths: tuple[int, ...] = (384, 768), vocabulary: int = 50_257, repeat: int = 9) -> list[list[float]]:
    """A GPT-2 of 6 layers at random, 2 texts of 64 tokens: width, ms of its pass, shares of `adjust_` and of the whole head.

    Middle of runs that take turns, in processor time of one thread; at every position, not only at the last.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.set_num_threads(1)
    found, member = [], membership(2)
    lists = {f"list {k}": list(range(100 * k, 100 * k + 60)) for k in range(1, 3)}
    head = gmc.DistributionHead(lists, 1e-3, GROUPS).fit(torch.randn(64, vocabulary), membership(64))
    for width in widths:
        net = GPT2LMHeadModel(GPT2Config(vocab_size=vocabulary, n_embd=width, n_layer=6, n_head=width // 64)).eval()
        ids = torch.randint(vocabulary, (2, 64))
        with torch.inference_mode():
            logits = net(ids).logits
            want = head(logits, member)
            assert (head.adjust_(logits.clone(), member).log_softmax(-1) - want).abs().max() < 1e-4
            works = (lambda: net(ids), lambda: head.adjust_(logits, member), lambda: head(logits, member))  # noqa: B023
            times: list[list[float]] = [[], [], []]
            for _ in range(repeat):
                for work, own in zip(works, times, strict=True):
                    start = time.process_time()
                    work()
                    own.append(time.process_time() - start)
        one, ours, whole = (sorted(own)[repeat // 2] for own in times)
        found.append([width, 1e3 * one, ours / (one + ours), whole / (one + whole)])
    return found


def scripted(net: nn.Module, model: gmc.CalibratedModel, inputs: tuple[Tensor, ...], repeat: int) -> tuple[float, float]:
    """Share of the scripted head (on what it sees of the scores) in the exported file's pass, and seconds of that pass."""
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript announces its end, and a trace what it fixes
        calibrated = torch.jit.load(model.export(Path(folder) / "model.pt", example_inputs=inputs))
        head = torch.jit.script(model.head)
        scores = model.scores(*inputs[:-1])
        if model.adapter.position is not None:  # one position of each text
            scores = scores[:, inputs[0].shape[1] // 2].contiguous()
        for _ in range(3):  # the executor optimises in its first runs
            head(scores, inputs[-1]), calibrated(*inputs)
        alone, whole = quickest(lambda: head(scores, inputs[-1]), lambda: calibrated(*inputs), repeat=repeat)
    return alone / whole, whole


def exchange(rank: int, store: str, sizes: list[int], found: Any) -> None:
    """One of two ranks: bytes of a fit per cell, and of one per example, against n."""
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    for n in sizes:
        rows = n // 2
        torch.manual_seed(rank)
        for name, work in {
            "threshold, per cell": lambda rows=rows: gmc.ThresholdHead(0.1, 0.5, GROUPS).fit(
                torch.rand(rows, 16), torch.rand(rows, 16) < 0.5, membership(rows)
            ),
            "distribution, per example": lambda rows=rows: gmc.DistributionHead({"l": [1, 2]}, 0.01, GROUPS).fit(
                torch.randn(rows, 8), membership(rows)
            ),
        }.items():
            before = exchanged_bytes()
            work()
            if rank == 0:
                found.put((name, n, exchanged_bytes() - before))
    dist.barrier()
    dist.destroy_process_group()


def bytes_against_n(sizes: list[int]) -> list[tuple[str, int, int]]:
    queue = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(exchange, (f"{folder}/store", sizes, queue), nprocs=2)
    return [queue.get() for _ in range(2 * len(sizes))]


def run(small: bool = False, tiny: bool = False) -> list[Row]:
    """The rows of the speed table: the head's share of a forward pass, in percent."""
    little = small or tiny
    sizes = (1, 24, 500, 2, 8) if little else (6, 384, 30522, 8, 32)
    cases: list[tuple[str, str, Callable[[], Any]]] = [
        (
            "segmentation_models_pytorch",
            "U-Net resnet18 64x64, batch 2" if little else "U-Net resnet18 256x256, batch 4",
            lambda: unet(*((64, 2, "resnet18") if little else (256, 4, "resnet18"))),
        ),
        (
            "transformers",
            f"encoder {sizes[0]}x{sizes[1]}, {sizes[2]:,} tokens, at the mask",
            lambda: encoder(*sizes, masked=True),
        ),
    ]
    rows = []
    for package, name, make in cases:
        work, target = f"head's share of a forward pass: {name}", "<= 2 %"
        if importlib.util.find_spec(package) is None:
            rows.append(Row("overhead", work, "%", None, target, note=f"{package} is not installed"))
            continue
        torch.manual_seed(0)
        net, model, inputs = make()
        same_as_plain(net, model, inputs)
        repeat = 1 if tiny else 15
        share, _ = eager(net, model, inputs, repeat)
        other, _ = scripted(net, model, inputs, repeat)
        rows.append(
            Row(
                benchmark="overhead",
                work=work,
                unit="% of the pass",
                ours=100 * share,
                limit=0.0,
                target=target,
                reached=None if little else share <= 0.02,
                note=f"scripted: {100 * other:.3g} % of the exported file's pass; checks of values: "
                f"{100 * checking(model, inputs, repeat):.3g} % of the eager pass",
            )
        )
        if package == "transformers":
            share = in_place(net, model, inputs, repeat)
            work = f"`adjust_` at every position: {name.removesuffix(', at the mask')}"
            reached = None if little else share <= 0.005
            rows.append(Row("overhead", work, "% of the pass", 100 * share, "<= 0.5 %", reached, limit=0.0))
    return rows


def same_as_plain(net: nn.Module, model: gmc.CalibratedModel, inputs: tuple[Tensor, ...]) -> None:
    """The calibrated pass is the model's own scores through the head, done by hand."""
    with torch.inference_mode():
        scores, found = model.scores(*inputs[:-1]), model(*inputs)
        if model.adapter.position is not None:
            position = inputs[0].shape[1] // 2
            expected = model.head(scores[:, position].contiguous(), inputs[-1])
            torch.testing.assert_close(getattr(found, "logits", found)[:, position], expected)
        else:
            flat = scores.squeeze(1) if scores.dim() == 4 else scores
            torch.testing.assert_close(found.reshape(flat.shape), model.head(flat, inputs[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--repeat", type=int, default=15)
    options = parser.parse_args()
    print(header())
    torch.manual_seed(0)
    small = options.small
    text = (1, 24, 500, 2, 8) if small else (6, 384, 30522, 8, 32)
    cases = {
        "U-Net 64x64" if small else "U-Net resnet18 256x256, batch 4": unet(
            *((64, 2, "resnet18") if small else (256, 4, "resnet18"))
        ),
        f"encoder {text[0]}x{text[1]}, {text[2]} tokens, at the mask": encoder(*text, masked=True),
        f"encoder {text[0]}x{text[1]}, {text[2]} tokens, every position": encoder(*text, masked=False),
    }
    print(f"{'model':50s} {'eager':>8s} {'of ms':>8s} {'scripted':>9s} {'of ms':>8s} {'checks':>8s}")
    for name, (net, model, inputs) in cases.items():
        share, seconds = eager(net, model, inputs, options.repeat)
        other, traced = scripted(net, model, inputs, options.repeat)
        checks = checking(model, inputs, options.repeat)
        print(f"{name:50s} {100 * share:7.2f}% {1e3 * seconds:8.1f} {100 * other:8.2f}% {1e3 * traced:8.1f} {100 * checks:7.2f}%")
    net, model, inputs = list(cases.values())[-1]
    print(f"`adjust_` at every position: {100 * in_place(net, model, inputs, options.repeat):.3f} % of the pass")
    print("\nGPT-2 at every position: width, ms of the pass, shares of `adjust_` and of the whole head")
    for width, ms, ours, whole in positions(*(((64,), 500, 3) if small else ())):
        print(f"{width:5.0f} {ms:8.0f} {100 * ours:8.3f} % {100 * whole:8.2f} %")
    print("\nbytes that one of two ranks contributes to a fit")
    for name, n, size in bytes_against_n([100, 1000, 10_000] if small else [100, 1000, 10_000, 100_000]):
        print(f"{name:30s} n = {n:7d} {size:12d}")


if __name__ == "__main__":
    main()
