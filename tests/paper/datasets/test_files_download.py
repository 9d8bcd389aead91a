"""Downloads against a server on the loopback interface: whole, broken off, wrong, missing, unreachable; and the registry."""

import hashlib
import http.server
import io
import re
import sys
import threading
import time
import types
import urllib.parse
from pathlib import Path

import pytest

pooch = pytest.importorskip("pooch")

from torchgmc_paper.datasets import FASSEG, GenderPrompts, HierarchicalText, _files  # noqa: E402
from torchgmc_paper.datasets._files import DownloadError, fetch  # noqa: E402
from torchgmc_paper.datasets.prepare import faces, prompts, texts  # noqa: E402

CONTENT = bytes(range(256)) * 1200  # 300 kB: several chunks


class Server:
    """Serves ``files``; ``breaks``: bytes after which the next answers break off; ``errors``: what they say instead.

    Files in ``held`` are answered once their event is set.
    """

    def __init__(self):
        self.files, self.breaks, self.errors, self.asked, self.held = {}, [], [], [], {}
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                outer.answer(self)

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()

    def answer(self, request):
        path = urllib.parse.unquote(request.path).removeprefix("/")
        self.asked.append(path)
        content = self.files.get(path)
        assert path not in self.held or self.held[path].wait(60)
        if self.errors or content is None:
            return request.send_error(self.errors.pop(0) if self.errors else 404)
        request.send_response(200)
        request.send_header("Content-Length", str(len(content)))
        request.end_headers()
        request.wfile.write(content[: self.breaks.pop(0)] if self.breaks else content)

    def close(self):
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def server(monkeypatch, tmp_path_factory):
    """``server.publish(files)``: they are served, and the registry knows them."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    registry = tmp_path_factory.mktemp("registry") / "registry.txt"
    monkeypatch.setattr(_files, "REGISTRY", registry)
    monkeypatch.setattr(_files, "RETRIES", 0)
    running = Server()

    def publish(files):
        running.files |= files
        lines = [f"{name} {hashlib.sha256(b).hexdigest()} {running.url}/{urllib.parse.quote(name)}" for name, b in files.items()]
        registry.write_text("\n".join(lines))

    running.publish = publish
    publish({"sub/a.bin": CONTENT})
    yield running
    running.close()


def below(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_what_is_wanted_comes_whole_and_is_not_asked_for_again(server, tmp_path, capsys):
    server.publish({"x/+30/a.bmp": b"one", "x/c.txt": CONTENT, "xy.txt": b"no", **{f"x/many/{k}": bytes([k]) for k in range(20)}})
    fetch(tmp_path, "data", ["x"])
    assert {name: (tmp_path / name).read_bytes() for name in below(tmp_path)} == {
        name: content for name, content in server.files.items() if name.startswith("x/")
    }
    asked = len(server.asked)
    fetch(tmp_path, "data", ["x"])
    assert len(server.asked) == asked == 22
    assert capsys.readouterr().err == "" and pooch.get_logger().level < 30  # silent, and only while it fetched


def test_a_wrong_copy_is_replaced_by_a_good_one(server, tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.bin").write_bytes(CONTENT[:-1])
    fetch(tmp_path, "data", ["sub/a.bin"])
    assert (tmp_path / "sub" / "a.bin").read_bytes() == CONTENT and below(tmp_path) == ["sub/a.bin"]


def test_nothing_half_written_or_wrong_is_left(server, tmp_path):
    """The error names the file, says what was wrong and what to do; an older copy stays until there is a good one."""
    by_hand = r".*by hand to '.*a\.bin', or point `root` or TORCHGMC_DATA to a folder that has the data\."
    for spoil, reason in (
        (lambda: server.breaks.append(70_000), "70000 bytes read"),
        (lambda: server.errors.append(404), "404 Client Error"),
        (lambda: server.errors.append(503), "503 Server Error"),
        (
            lambda: server.files.update({"sub/a.bin": b"other"}),
            f"expected {hashlib.sha256(CONTENT).hexdigest()} but got [0-9a-f]+",
        ),
        (server.close, "refused"),
    ):
        spoil()
        with pytest.raises(DownloadError, match=rf"could not fetch http://127\S*/sub/a\.bin: .*{reason}{by_hand}"):
            fetch(tmp_path, "data", ["sub"])
        assert not below(tmp_path)
    (tmp_path / "sub" / "a.bin").write_bytes(b"old")
    with pytest.raises(DownloadError):
        fetch(tmp_path, "data", ["sub"])
    assert (tmp_path / "sub" / "a.bin").read_bytes() == b"old"


def test_a_busy_server_and_a_broken_connection_are_tried_again(server, tmp_path, monkeypatch):
    monkeypatch.setattr(_files, "RETRIES", 3)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    server.errors, server.breaks = [503, 429], [100_000]
    fetch(tmp_path, "data", ["sub"])
    assert (tmp_path / "sub" / "a.bin").read_bytes() == CONTENT and len(server.asked) == 4


def test_one_bad_of_many_ends_it_and_what_has_come_stays(server, tmp_path, monkeypatch):
    """Eight threads at most are under way when the first error is known, so no more than eight later files are asked for."""
    failed = threading.Event()
    monkeypatch.setattr(_files, "threading", types.SimpleNamespace(Event=lambda: failed))
    server.publish({f"many/{k}": b"%d" % k for k in range(300)})
    del server.files["many/10"]
    server.held = {f"many/{k}": failed for k in range(11, 300)}
    with pytest.raises(DownloadError, match="many/10: 404"):
        fetch(tmp_path, "data", ["many"])
    assert {f"many/{k}" for k in range(10)} <= set(below(tmp_path)) and len(server.asked) <= 11 + 8


@pytest.mark.parametrize(("files", "bar"), [({"a": CONTENT}, r"100%.*307k/307k"), ({"a": b"1", "b": b"2"}, r"data: 100%.*2/2")])
def test_progress_on_a_terminal(server, tmp_path, capsys, monkeypatch, files, bar):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    server.publish(files)
    fetch(tmp_path, "data", list(files))
    assert re.search(bar, capsys.readouterr().err)


@pytest.mark.parametrize("package", ["pooch", "tqdm"])
def test_a_missing_package_names_the_extra(server, tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"`{package}` .*torchgmc\[datasets\]"):
        HierarchicalText(tmp_path, "wos", download=True)
    assert not server.asked


# The data sets


def test_fasseg_download(server, tmp_path, monkeypatch):
    pil = pytest.importorskip("PIL.Image")

    def bitmap(colour):
        file = io.BytesIO()
        pil.new("RGB", (20, 30), colour).save(file, "BMP")
        return file.getvalue()

    files = {}
    for image, label in (
        ("V2/Train_RGB/1.bmp", "V2/Train_Labels/1.bmp"),
        ("V3/Test_RGB/+30/personne08148+0+30.bmp", "V3/Test_labels/+30/personne08148+0+30.bmp"),
    ):
        files |= {f"{faces.FOLDER}/{image}": bitmap((200, 150, 120)), f"{faces.FOLDER}/{label}": bitmap((255, 255, 0))}
    server.publish(files | {"sent_debias/x.txt": b"no"})
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "PIL.Image", None)
        without.setitem(sys.modules, "PIL", None)
        with pytest.raises(ImportError, match=r"torchgmc\[datasets\]"):  # said before the download
            FASSEG(tmp_path, download=True)
    assert not server.asked
    found = FASSEG(tmp_path, subset="all", download=True)
    assert len(found) == 2 and found.face.equal(found.valid) and found.hw.tolist() == [[192, 128]] * 2
    assert sorted(server.asked) == sorted(files)
    assert len(FASSEG(tmp_path, subset="frontal", download=True)) == 1 and len(server.asked) == 4


def test_prompts_and_amazon_download(server, tmp_path):
    corpus, wiki = prompts.ORIGINAL
    sentences = {f"{corpus}/sst.txt": b"1\tShe is strong .\n", f"{corpus}/POM/1.txt": b"He is rude."}
    rows = b"text,cat1,cat2,cat3\n" + b"".join(b"review %d,pets,dogs,toys\n" % k for k in range(6))
    server.publish(sentences | {f"{wiki}/valid.txt": b" A brave king . \n", texts.ORIGINAL["amazon"]: rows})
    found = GenderPrompts(tmp_path, download=True)
    assert found.texts == ["She is [MASK] .", "He is [MASK].", "A [MASK] king ."] and len(server.asked) == 3
    assert len(HierarchicalText(tmp_path, "amazon", download=True)) == 6


def test_the_registry_has_every_file_that_is_needed_at_a_pinned_address():
    store = pooch.create("unused", base_url="")
    store.load_registry(Path(_files.__file__).with_name("registry.txt"))
    assert all(re.fullmatch("[0-9a-f]{64}", sha) for sha in store.registry.values())
    for name in store.registry_files:
        address = store.get_url(name)
        if name not in (texts.ORIGINAL["wos"], texts.ORIGINAL["newsgroups"]):
            repository, path = name.split("/", 1)
            ends = rf"https://raw\.githubusercontent\.com/[\w-]+/{repository}/[0-9a-f]{{40}}/{re.escape(urllib.parse.quote(path))}"
            assert re.fullmatch(ends, address), address
    found = [Path(name) for name in store.registry_files]
    counts = {place: sum(path.is_relative_to(place) for path in found) for place in (*faces.ORIGINAL, *prompts.ORIGINAL)}
    assert list(counts.values()) == [140, 556, 1003, 2] and sum(counts.values()) + 3 == len(found)
    labels = [name for name in store.registry_files if "abels/" in name]
    assert len(labels) == 348 and all(faces.twin(name) in store.registry for name in labels)
    assert all(name in store.registry for name in texts.ORIGINAL.values())
