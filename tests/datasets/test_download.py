"""Downloads against a server on the loopback interface: whole, broken off and resumed, wrong, missing, unreachable."""

import hashlib
import http.server
import io
import json
import re
import shutil
import socket
import subprocess
import tempfile
import threading
import urllib.parse
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torchgmc.datasets import FASSEG, GenderPrompts, HierarchicalText, _download, _prompts, _texts
from torchgmc.datasets._download import DownloadError, Progress, Remote, fetch, fetch_all, github_files, tree_id

CONTENT = bytes(range(256)) * 1200  # 300 kB: several chunks
SHA = hashlib.sha256(CONTENT).hexdigest()


class Server:
    """Serves ``files``; ``ranges``: understands Range; ``breaks``: bytes after which the next answers break off."""

    def __init__(self):
        self.files, self.ranges, self.breaks, self.errors, self.asked = {}, True, [], [], []
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
        wanted = request.headers.get("Range")
        self.asked.append((request.path, wanted))
        if self.errors:
            return request.send_error(self.errors.pop(0))
        content = self.files.get(urllib.parse.unquote(request.path))
        if content is None:
            return request.send_error(404)
        start = int(re.fullmatch(r"bytes=(\d+)-", wanted)[1]) if wanted and self.ranges else 0
        if start and start >= len(content):
            request.send_response(416)
            request.send_header("Content-Range", f"bytes */{len(content)}")
            request.send_header("Content-Length", "0")
            return request.end_headers()
        request.send_response(206 if start else 200)
        if start:
            request.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        request.send_header("Content-Length", str(len(content) - start))
        request.end_headers()
        end = start + self.breaks.pop(0) if self.breaks else len(content)
        request.wfile.write(content[start:end])

    def close(self):
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(_download, "PAUSES", (0.0, 0.0, 0.0))
    monkeypatch.setattr(_download, "TIMEOUT", 5.0)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    running = Server()
    running.files["/a.bin"] = CONTENT
    yield running
    running.close()


def remote(server, **known):
    return Remote(f"{server.url}/a.bin", "sub/a.bin", **known)


def test_whole_file_and_no_second_request(server, tmp_path):
    blob = hashlib.sha1(b"blob %d\0" % len(CONTENT) + CONTENT).hexdigest()
    file = fetch(remote(server, size=len(CONTENT), sha256=SHA, blob=blob), tmp_path)
    assert file == tmp_path / "sub" / "a.bin" and file.read_bytes() == CONTENT
    assert [p.name for p in file.parent.iterdir()] == ["a.bin"]
    fetch(remote(server, sha256=SHA), tmp_path)
    assert len(server.asked) == 1


def test_a_broken_connection_is_continued(server, tmp_path):
    server.breaks = [100_000, 50_000]
    assert fetch(remote(server, sha256=SHA), tmp_path).read_bytes() == CONTENT
    assert [wanted for _, wanted in server.asked] == [None, "bytes=100000-", "bytes=150000-"]


def test_resumed_in_a_later_run(server, tmp_path):
    server.breaks = [70_000, 0, 0, 0]
    with pytest.raises(DownloadError, match=r"could not reach 127.0.0.1.*the connection broke off.*by hand to .*a\.bin"):
        fetch(remote(server, sha256=SHA), tmp_path)
    part = tmp_path / "sub" / "a.bin.part"
    assert part.read_bytes() == CONTENT[:70_000] and not (tmp_path / "sub" / "a.bin").exists()
    server.asked.clear()
    assert fetch(remote(server, sha256=SHA), tmp_path).read_bytes() == CONTENT
    assert server.asked == [("/a.bin", "bytes=70000-")] and not part.exists()


def test_server_without_ranges_starts_anew(server, tmp_path):
    server.ranges, server.breaks = False, [70_000]
    assert fetch(remote(server, sha256=SHA), tmp_path).read_bytes() == CONTENT
    assert [wanted for _, wanted in server.asked] == [None, "bytes=70000-"]


@pytest.mark.parametrize("size", [None, len(CONTENT)])
def test_a_complete_part_needs_no_more_bytes(server, tmp_path, size):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.bin.part").write_bytes(CONTENT)
    assert fetch(remote(server, sha256=SHA, size=size), tmp_path).read_bytes() == CONTENT
    assert len(server.asked) == (size is None)


@pytest.mark.parametrize("left", [b"x" * 1000, b"x" * len(CONTENT), b"x" * (len(CONTENT) + 5)])
@pytest.mark.parametrize("size", [None, len(CONTENT)])
def test_a_part_of_another_file_is_thrown_away(server, tmp_path, left, size):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.bin.part").write_bytes(left)
    assert fetch(remote(server, sha256=SHA, size=size), tmp_path).read_bytes() == CONTENT


@pytest.mark.parametrize("known", [{"sha256": "0" * 64}, {"blob": "0" * 40}, {"size": 7}])
def test_wrong_content_is_refused(server, tmp_path, known):
    with pytest.raises(
        DownloadError, match=r"a.bin is not what it should be: (its (sha256|blob)|it has).*instead of.*thrown away"
    ):
        fetch(remote(server, **known), tmp_path)
    assert not list((tmp_path / "sub").iterdir())


def test_an_older_copy_is_replaced_only_by_a_good_one(server, tmp_path):
    (tmp_path / "sub").mkdir()
    file = tmp_path / "sub" / "a.bin"
    file.write_bytes(b"old")
    with pytest.raises(DownloadError):
        fetch(remote(server, sha256="0" * 64), tmp_path)
    assert file.read_bytes() == b"old"
    assert fetch(remote(server, sha256=SHA), tmp_path).read_bytes() == CONTENT


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(breaks=st.lists(st.integers(0, len(CONTENT)), max_size=3), ranges=st.booleans(), left=st.integers(0, len(CONTENT)))
def test_however_it_breaks_off_the_file_is_right(server, breaks, ranges, left):
    server.breaks, server.ranges = list(breaks), ranges
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sub").mkdir()
        (Path(folder) / "sub" / "a.bin.part").write_bytes(CONTENT[:left])
        assert fetch(remote(server, sha256=SHA), Path(folder)).read_bytes() == CONTENT


def test_not_found_is_not_tried_again(server, tmp_path):
    with pytest.raises(DownloadError, match=r"could not fetch .*/b.bin: the server says 404 .*by hand.*TORCHGMC_DATA"):
        fetch(Remote(f"{server.url}/b.bin", "b.bin"), tmp_path)
    assert len(server.asked) == 1


def test_a_busy_server_is_tried_again(server, tmp_path):
    server.errors = [503, 429]
    assert fetch(remote(server, sha256=SHA), tmp_path).read_bytes() == CONTENT
    server.errors, server.files["/c"] = [500] * 9, b"c"
    with pytest.raises(DownloadError, match="the server says 500"):
        fetch(Remote(f"{server.url}/c", "c"), tmp_path)


def test_nobody_listens(server, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(DownloadError, match=rf"could not reach 127.0.0.1:{port} .*refused.*by hand to .*TORCHGMC_DATA"):
        fetch(Remote(f"http://127.0.0.1:{port}/a", "a"), tmp_path)


def test_many_files_and_one_bad(server, tmp_path):
    server.files |= {f"/{k}": bytes([k]) * 1000 for k in range(20)}
    many = [Remote(f"{server.url}/{k}", f"many/{k}", size=1000) for k in range(20)]
    fetch_all(many, tmp_path, "many")
    assert all((tmp_path / "many" / str(k)).read_bytes() == bytes([k]) * 1000 for k in range(20))
    with pytest.raises(DownloadError, match="404"):
        fetch_all([*many, Remote(f"{server.url}/none", "none", size=1)], tmp_path, "many")


@pytest.mark.parametrize("path", ["../a.bin", "sub/../../a.bin", "/a.bin"])
def test_nothing_is_written_elsewhere(server, tmp_path, path):
    with pytest.raises(DownloadError, match="outside of the folder"):
        fetch(Remote(f"{server.url}/a.bin", path), tmp_path / "root")
    assert not server.asked and not (tmp_path / "a.bin").exists()


def test_progress_line(capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    bar = Progress("a.bin", 2_000_000)
    bar.add(1_000_000)
    bar.close()
    assert re.search(r"\ra.bin: \[#{15} {15}\]  50 %, 1.0 MB of 2.0 MB \n$", capsys.readouterr().err)
    silent = Progress("a.bin", 10, wanted=False)
    silent.add(10)
    silent.close()
    assert capsys.readouterr().err == ""


# A repository


def publish(server, repository, commit, files):
    """Serve files as GitHub does: the commit, its tree, the raw content."""
    entries, folders = [], set()
    for path, content in files.items():
        blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        entries.append({"path": path, "mode": "100644", "type": "blob", "sha": blob, "size": len(content)})
        parts = path.split("/")[:-1]
        folders |= {"/".join(parts[: k + 1]) for k in range(len(parts))}
    entries += [{"path": folder, "mode": "040000", "type": "tree", "sha": "f" * 40} for folder in folders]
    full, tree = commit + "0" * (40 - len(commit)), tree_id(entries)
    at = f"/repos/{repository}"
    server.files[f"{at}/commits/{commit}"] = json.dumps({"sha": full, "commit": {"tree": {"sha": tree}}}).encode()
    server.files[f"{at}/git/trees/{tree}?recursive=1"] = json.dumps({"tree": entries, "truncated": False}).encode()
    server.files |= {f"/raw/{repository}/{full}/{path}": content for path, content in files.items()}
    return f"{at}/git/trees/{tree}?recursive=1", f"/raw/{repository}/{full}/"


@pytest.fixture
def github(server, monkeypatch):
    monkeypatch.setattr(_download, "GITHUB_API", server.url)
    monkeypatch.setattr(_download, "GITHUB_RAW", f"{server.url}/raw")
    return server


def test_tree_id_is_gits(tmp_path):
    """A repository made by git itself, if there is one to ask."""
    if shutil.which("git") is None:
        pytest.skip("no git")
    for path, text in {"a.txt": "1", "a/b.txt": "2", "a-b": "3", "a/c/+0.bmp": "4"}.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    def git(*words):
        return subprocess.run(["git", "-C", str(tmp_path), *words], check=True, capture_output=True, text=True).stdout

    git("init", "-q")
    git("add", ".")
    tree = git("write-tree").strip()
    entries = []
    for line in git("ls-tree", "-r", "-t", tree).splitlines():
        mode, kind, rest = line.split(" ", 2)
        sha, path = rest.split("\t")
        entries.append({"path": path, "mode": mode, "type": kind, "sha": sha})
    assert tree_id(entries) == tree
    entries[-1]["sha"] = "0" * 40
    assert tree_id(entries) != tree


def test_files_of_a_repository(github, tmp_path):
    files = {"x/+30/a b.txt": b"one", "x/c.txt": b"two", "no.txt": b"three"}
    tree, raw = publish(github, "me/data", "abc1234", files)
    chosen = github_files("me/data", "abc1234", "here", tmp_path, lambda path: path.startswith("x/"))
    fetch_all(chosen, tmp_path, "data")
    assert (tmp_path / "here/x/+30/a b.txt").read_bytes() == b"one" and (tmp_path / "here/x/c.txt").read_bytes() == b"two"
    assert not (tmp_path / "here/no.txt").exists()
    github.asked.clear()
    fetch_all(github_files("me/data", "abc1234", "here", tmp_path, lambda path: path.startswith("x/")), tmp_path, "data")
    assert not github.asked  # all there: nothing is asked again

    github.files[f"{raw}x/c.txt"] = b"TWO"
    with pytest.raises(DownloadError, match="its blob is .* instead of"):
        fetch_all(github_files("me/data", "abc1234", "there", tmp_path, lambda p: True), tmp_path, "data")
    listing = json.loads(github.files[tree])
    listing["tree"][0]["sha"] = "0" * 40
    github.files[tree] = json.dumps(listing).encode()
    with pytest.raises(DownloadError, match="does not have the hash"):
        github_files("me/data", "abc1234", "elsewhere", tmp_path, lambda p: True)
    assert not list((tmp_path / "elsewhere").iterdir())  # the wrong answer is not kept
    github.files[tree] = json.dumps(listing | {"truncated": True}).encode()
    with pytest.raises(DownloadError, match="truncated; clone"):
        github_files("me/data", "abc1234", "other", tmp_path, lambda p: True)
    github.files["/repos/me/data/commits/abc1234"] = json.dumps({"sha": "0" * 40, "commit": {"tree": {"sha": ""}}}).encode()
    with pytest.raises(DownloadError, match="asked .* for commit abc1234, got 000"):
        github_files("me/data", "abc1234", "wrong", tmp_path, lambda p: True)


def test_fasseg_download(github, tmp_path):
    pil = pytest.importorskip("PIL.Image")

    def bitmap(colour):
        file = io.BytesIO()
        pil.new("RGB", (20, 30), colour).save(file, "BMP")
        return file.getvalue()

    files = {"README.md": b"no", "V1/Train_RGB/1.bmp": b"no", "V3/Test_RGB/+45/personne08149+0+45.bmp": b"unlabelled"}
    for image, label in (
        ("V2/Train_RGB/1.bmp", "V2/Train_Labels/1.bmp"),
        ("V3/Test_RGB/+30/personne08148+0+30.bmp", "V3/Test_labels/+30/personne08148+0+30.bmp"),
    ):
        files |= {image: bitmap((200, 150, 120)), label: bitmap((255, 255, 0))}
    publish(github, "massimomauro/FASSEG-repository", "7817f33", files)
    faces = FASSEG(tmp_path, subset="all", download=True)
    assert len(faces) == 2 and faces.face.equal(faces.valid) and faces.hw.tolist() == [[192, 128]] * 2
    asked = [path for path, _ in github.asked if path.startswith("/raw")]
    assert len(asked) == 4 and not any("V1" in path or "08149" in path for path in asked)
    github.asked.clear()
    assert len(FASSEG(tmp_path, subset="frontal", download=True)) == 1 and not github.asked


def test_prompts_and_amazon_download(github, tmp_path):
    corpus = {f"{_prompts.CORPUS}/sst.txt": b"1\tShe is strong .\n", f"{_prompts.CORPUS}/POM/1.txt": b"He is rude."}
    publish(github, "pliang279/sent_debias", "1be02d4", corpus | {f"{_prompts.CORPUS}/yelp.txt": b"no", "x.py": b"no"})
    publish(
        github, "pytorch/examples", "77f55b9", {f"{_prompts.WIKITEXT}/valid.txt": b" A brave king . \n", "mnist/main.py": b"no"}
    )
    prompts = GenderPrompts(tmp_path, download=True)
    assert prompts.texts == ["She is [MASK] .", "He is [MASK].", "A [MASK] king ."]
    assert not (tmp_path / "sent_debias/x.py").exists()
    rows = b"text,cat1,cat2,cat3\n" + b"".join(b"review %d,pets,dogs,toys\n" % k for k in range(6))
    publish(github, "Migue8gl/HierarchicalTextClassification", "60a5845", {"data/test.csv": rows, "README.md": b"no"})
    assert len(HierarchicalText(tmp_path, "amazon", download=True)) == 6


def test_archives_are_checked(server, tmp_path, monkeypatch):
    server.files["/wos"] = b"not the archive"
    for name in ("WOS", "NEWSGROUPS"):
        known = getattr(_texts, name)
        monkeypatch.setattr(_texts, name, Remote(f"{server.url}/wos", known.path, known.size, known.sha256))
    with pytest.raises(DownloadError, match="has 15 bytes instead of 60222421"):
        HierarchicalText(tmp_path, "wos", download=True)
    with pytest.raises(DownloadError, match="its sha256 is .* instead of 8f1b2514"):
        HierarchicalText(tmp_path, "newsgroups", download=True)
    assert not list(tmp_path.iterdir())
