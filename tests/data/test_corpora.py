"""Where documents come from, which are used, and which are held out."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import pytest

from odeformer.config import DataConfig
from odeformer.data import Document, read_corpus, split_documents
from odeformer.data.cache import digest_of
from odeformer.data.corpora import within


def corpus(*sources: Path | str, **settings: object) -> list[Document]:
    return read_corpus(DataConfig(source=[str(source) for source in sources], **settings))  # type: ignore[arg-type]


def documents(sizes: Sequence[int], character: str = "x") -> list[Document]:
    return [Document(f"{number:03d}", character * size) for number, size in enumerate(sizes)]


def write_rows(path: Path, rows: Sequence[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def stdlib() -> list[Document]:
    return read_corpus(DataConfig())


def test_the_embedded_corpus_is_the_standard_library_without_tests(stdlib: list[Document]) -> None:
    names = [document.name for document in stdlib]
    assert 8e6 < sum(document.size for document in stdlib) < 20e6
    assert {"os.py", "pydoc_data/topics.py", "json/decoder.py"} <= set(names)
    folders = {part for name in names for part in name.split("/")[:-1]}
    assert not folders & {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    assert names == sorted(names) and len(set(names)) == len(names)


def test_the_embedded_corpus_is_held_out_by_whole_modules(stdlib: list[Document]) -> None:
    split = split_documents(stdlib, 0.1)
    assert sorted([*split.train, *split.validation], key=lambda d: d.name) == stdlib
    share = sum(d.size for d in split.validation) / sum(d.size for d in stdlib)
    assert abs(share - 0.1) < 5e-3


def test_the_same_corpus_in_another_process(stdlib: list[Document]) -> None:
    program = (
        "from odeformer.config import DataConfig; from odeformer.data import *\n"
        "from odeformer.data.cache import digest_of\n"
        "print(digest_of(split_documents(read_corpus(DataConfig(max_bytes=1000000)), 0.1)))"
    )
    environment = {
        **os.environ,
        "PYTHONHASHSEED": "7",
        "LC_ALL": "C",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    run = subprocess.check_output([sys.executable, "-c", program], env=environment, text=True)
    assert run.strip() == digest_of(split_documents(within(stdlib, 1_000_000), 0.1))


def test_a_small_part_of_the_corpus_is_a_mixture(stdlib: list[Document]) -> None:
    part = within(stdlib, 200_000)
    assert 190_000 < sum(document.size for document in part) <= 200_000
    assert len({document.name[0] for document in part}) > 5
    assert within(stdlib, 200_000) == part


@pytest.mark.parametrize("left", [None, "string.py"])
def test_missing_sources_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: str | None) -> None:
    root = tmp_path / "python.zip"
    if left:
        root.mkdir()
        (root / left).write_text("pass")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(root))
    with pytest.raises(FileNotFoundError, match=r"python\.zip.os\.py"):
        read_corpus(DataConfig())


def test_a_folder_in_the_order_of_its_names(tmp_path: Path) -> None:
    (tmp_path / "b" / ".git").mkdir(parents=True)
    for name in ("z.txt", "b/ä.md", "B.py", ".hidden", "b/.git/config", "b/empty.txt"):
        (tmp_path / name).write_bytes(b"" if "empty" in name else name.encode())
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\0")
    found = corpus(tmp_path)
    assert [(d.name, d.text) for d in found] == [(name, name) for name in ("B.py", "b/ä.md", "z.txt")]
    # Neither the place of the corpus nor the way of naming it matters, and no file is read twice.
    assert corpus(tmp_path, tmp_path / "z.txt", f"{tmp_path}/*.py") == found
    assert corpus(tmp_path / "**" / "*.[mtp][dxy]*") == found


def test_text_is_not_changed(tmp_path: Path) -> None:
    text = "first\r\nsecond\x0c\u2028\N{SNOWMAN}\n"
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert corpus(tmp_path / "a.txt")[0].text == text


def test_files_of_one_name_in_two_folders(tmp_path: Path) -> None:
    for folder in ("p", "q"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_text(folder)
    both = corpus(tmp_path / "q", tmp_path / "p")
    assert [d.text for d in both] == ["p", "q"]
    split = split_documents(both, 0.5)
    assert len(split.train) == len(split.validation) == 1


def test_json_lines(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"body": "one"}, {"body": "two", "n": 1}])
    path.write_text(path.read_text() + '\n{"body": "a\u2028b"}\n', encoding="utf-8")
    assert [d.text for d in corpus(path, text_field="body")] == ["one", "two", "a\u2028b"]
    packed = tmp_path / "packed" / "rows.jsonl.gz"
    packed.parent.mkdir()
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert [d.text for d in corpus(packed.parent, text_field="body")] == ["one", "two", "a\u2028b"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"body": "x", "id": 3}', "line 2: no key 'text'; there are 'body', 'id'"),
        ('{"text": null}', "line 2: 'text' must be text, got NoneType"),
        ('{"text": "\\ud800"}', "line 2: 'text' holds half a surrogate pair at 0"),
        ("[1]", "line 2: must be an object with 'text', got list"),
        ('{"text": ', "line 2: not JSON"),
    ],
)
def test_bad_json_lines(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(ValueError, match=f"rows.jsonl, {message}"):
        corpus(tmp_path)


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table({"text": ["one", "two"], "gap": ["one", None], "n": [1, 2]}), path)
    assert [d.text for d in corpus(tmp_path)] == ["one", "two"]
    with pytest.raises(ValueError, match=r"rows.parquet: no column 'body'; there are 'text', 'gap', 'n'"):
        corpus(path, text_field="body")
    with pytest.raises(ValueError, match=r"rows.parquet, row 2: 'gap' must be text, got NoneType"):
        corpus(path, text_field="gap")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"rows.parquet is not a Parquet file, or damaged"):
        corpus(path)


def test_hugging_face_data_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"text": ["one", "two"], "n": [1, 2]})
    rows.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict(train=rows, test=rows).save_to_disk(tmp_path / "parts")
    assert [d.text for d in corpus(f"hf:{tmp_path / 'saved'}")] == ["one", "two"]
    found = corpus(f"hf:{tmp_path / 'parts'}")
    assert [d.name for d in found if d.text == "two"] == ["parts:test:000000002", "parts:train:000000002"]
    with pytest.raises(ValueError, match=r"no column 'body'; there are 'text', 'n'"):
        corpus(f"hf:{tmp_path / 'saved'}", text_field="body")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        corpus(f"hf:{tmp_path}/nowhere")


@pytest.mark.parametrize(("package", "source"), [("datasets", "hf:a/b"), ("pyarrow.parquet", "rows.parquet")])
def test_a_missing_package_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, source: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.parquet").touch()
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"{package.split('.')[0]}: install odeformer-fastslow\[hf\]"):
        corpus(source)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("latin.txt", "naïve".encode("latin-1"), r"latin.txt is not UTF-8 text: byte 2 is 0xef"),
        ("marked.txt", b"\xef\xbb\xbfab\xff", r"marked.txt is not UTF-8 text: byte 5 is 0xff"),
        ("wide.txt", "text".encode("utf-16"), r"wide.txt is not UTF-8 text: byte 0"),
        ("packed.txt.gz", gzip.compress(b"text" * 99, mtime=0)[:20], r"packed.txt.gz is not a gzip file, or damaged"),
        ("empty.txt", b"", "holds no text"),
    ],
)
def test_bad_files_in_a_folder(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        corpus(tmp_path)


def test_missing_sources(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for missing in ("nowhere.txt", "*.none", "empty"):
        with pytest.raises(FileNotFoundError, match=missing.replace("*", r"\*")):
            corpus(tmp_path / missing)
    for source in ([], [""], ["hf:"]):
        with pytest.raises(ValueError, match="source must name at least one place"):
            corpus(*source)


@pytest.mark.parametrize("sizes", [[10] * 50, list(range(1, 60)), [1000, 1, 1, 1], [7, 7], [1, 900]])
@pytest.mark.parametrize("fraction", [0.01, 0.1, 0.5, 0.9])
def test_a_split_is_a_partition_near_the_fraction(sizes: list[int], fraction: float) -> None:
    every = documents(sizes)
    split = split_documents(every, fraction)
    assert split.train and split.validation
    assert sorted([*split.train, *split.validation], key=lambda d: d.name) == every
    held = sum(d.size for d in split.validation)
    # Each document of the wrong side would lead away from the target; the largest bounds the distance.
    assert abs(held - fraction * sum(sizes)) <= max(sizes)
    assert split == split_documents(every, fraction)


def test_one_document_is_cut_as_nanogpt_does() -> None:
    text = "".join(map(chr, range(200, 1337)))
    for fraction, cut in ((0.1, int(0.9 * len(text))), (0.5, len(text) // 2)):
        split = split_documents([Document("a", text)], fraction)
        assert (split.train[0].text, split.validation[0].text) == (text[:cut], text[cut:])


def test_a_split_needs_documents_and_a_fraction() -> None:
    with pytest.raises(ValueError, match="documents"):
        split_documents([], 0.1)
    with pytest.raises(ValueError, match="validation_fraction must be between 0 and 1, got 1"):
        split_documents(documents([2, 2]), 1)


def test_whole_documents_within_the_limit() -> None:
    every = documents([5, 40, 5, 5, 90])
    kept = within(every, 17)
    assert kept == [every[0], every[2], every[3]]
    assert within(every, 1000) == every


def test_a_document_beyond_the_limit_is_cut_between_characters(tmp_path: Path) -> None:
    assert [d.text for d in within(documents([9], "ä"), 5)] == ["ää"]
    (tmp_path / "a.txt").write_text("ää", encoding="utf-8")
    with pytest.raises(ValueError, match=r"holds no text within max_bytes=1"):
        corpus(tmp_path, max_bytes=1)
