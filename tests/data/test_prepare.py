"""`mdsp prepare` from text to datasets: through the command line, with real tokenizers, read back by transformers."""

from __future__ import annotations

import collections
import gzip
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from mdsp.cli import main
from mdsp.data import corpus, tokenise
from mdsp.data.indexed import IndexedDataset
from mdsp.data.prepare import PrepareOptions, prepare
from mdsp.data.sidecar import find_sidecar
from mdsp.data.tokenizer import load_tokenizer
from mdsp.data.tokens import TokenCorpus, check_vocabulary
from mdsp.errors import ConfigError, DataError

LINES = [f"Document {i}: the quick brown fox jumps over {i * 7} lazy dogs.\nZürich, déjà vu — 東京!" for i in range(60)]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A directory with a corpus of LINES and the result of the command on it: (directory, output prefix)."""
    directory = tmp_path_factory.mktemp("prepare")
    (directory / "text.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in LINES))
    output = str(directory / "out" / "small")
    arguments = ["prepare", str(directory / "text.jsonl"), "--output", output, "--valid-fraction", "0.1"]
    assert main([*arguments, "--train-tokenizer", "400"]) == 0
    return directory, output


def test_datasets_hold_the_documents_each_ended_by_the_separator(prepared: tuple[Path, str]) -> None:
    from transformers import AutoTokenizer

    _, output = prepared
    tokenizer = AutoTokenizer.from_pretrained(f"{output}_tokenizer")
    assert tokenizer.eos_token == "<|endoftext|>"
    decoded: list[str] = []
    for split, documents in (("train", 54), ("valid", 6)):
        dataset = IndexedDataset(f"{output}_{split}")
        assert dataset.n_documents == documents
        for index in range(documents):
            tokens = dataset.document(index).tolist()
            assert tokens[-1] == tokenizer.eos_token_id
            assert tokenizer.eos_token_id not in tokens[:-1]
            decoded.append(tokenizer.decode(tokens[:-1]))
            assert tokenizer.encode(decoded[-1], add_special_tokens=False) == tokens[:-1]
    assert sorted(decoded) == sorted(LINES)


def test_the_description_says_what_was_written(prepared: tuple[Path, str]) -> None:
    _, output = prepared
    train, valid = IndexedDataset(f"{output}_train"), IndexedDataset(f"{output}_valid")
    facts = find_sidecar(f"{output}_valid")
    assert facts is not None
    assert facts == find_sidecar(f"{output}_train")
    assert facts.valid is not None
    assert (facts.train.documents, facts.train.tokens) == (54, train.n_tokens)
    assert (facts.valid.documents, facts.valid.tokens) == (6, valid.n_tokens)
    assert facts.train.text_bytes + facts.valid.text_bytes == sum(len(line.encode()) for line in LINES)
    assert Path(facts.tokenizer) == Path(f"{output}_tokenizer")
    counts = collections.Counter(train.tokens.tolist())
    shares = [count / train.n_tokens for count in counts.values()]
    assert facts.unigram_entropy_nats == pytest.approx(-math.fsum(p * math.log(p) for p in shares), rel=1e-12)
    assert facts.train.max_token_id == max(counts)
    assert facts.vocab_size == Tokenizer.from_file(f"{output}_tokenizer/tokenizer.json").get_vocab_size()
    check_vocabulary(TokenCorpus.open(f"{output}_train"), facts.vocab_size)


def test_the_summary_names_everything(prepared: tuple[Path, str], capsys: pytest.CaptureFixture[str]) -> None:
    directory, output = prepared
    again = str(directory / "again" / "small")
    (directory / "empty.txt").write_text("")
    arguments = ["prepare", str(directory / "text.jsonl"), str(directory / "empty.txt"), "--output", again]
    assert main([*arguments, "--tokenizer", f"{output}_tokenizer", "--workers", "1"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""  # no progress bar where there is no terminal
    for expected in (f"{again}_train.bin/.idx", f"{again}.json", "60", "tokens/s", "nats", "1 empty", "<|endoftext|>"):
        assert expected in captured.out
    assert not Path(f"{again}_valid.idx").exists()


def test_running_twice_gives_the_same_bytes(prepared: tuple[Path, str]) -> None:
    directory, output = prepared
    names = [
        f"{output}{end}" for end in ("_train.bin", "_train.idx", "_valid.bin", ".json", "_tokenizer/tokenizer.json")
    ]
    before = [Path(name).read_bytes() for name in names]
    options = PrepareOptions(output, [str(directory / "text.jsonl")], train_tokenizer=400, valid_fraction=0.1)
    prepare(options)
    assert [Path(name).read_bytes() for name in names] == before
    assert not list(Path(output).parent.rglob("*.partial"))


def test_pieces_of_long_documents_have_the_tokens_of_the_whole(
    prepared: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, output = prepared
    source = "".join(f"def f{i}(a, b):\n    # it's the {i}th\n\n    return a_{i} * b\n\n\n" for i in range(200))
    (tmp_path / "long.py").write_text(source)
    monkeypatch.setattr(corpus, "PIECE", 100)
    monkeypatch.setattr(tokenise, "BATCH_CHARACTERS", 350)
    prepare(PrepareOptions(str(tmp_path / "x"), [str(tmp_path / "long.py")], tokenizer=f"{output}_tokenizer"))
    tokens = IndexedDataset(tmp_path / "x_train").document(0).tolist()
    whole = Tokenizer.from_file(f"{output}_tokenizer/tokenizer.json").encode(source).ids
    assert tokens == [*whole, 0]


def test_a_separator_written_in_a_document_is_text_unless_asked(prepared: tuple[Path, str], tmp_path: Path) -> None:
    _, output = prepared
    (tmp_path / "a.txt").write_text("one<|endoftext|>two")
    for parse, separators in ((False, 1), (True, 2)):
        options = PrepareOptions(
            str(tmp_path / "x"), [str(tmp_path / "a.txt")], tokenizer=f"{output}_tokenizer", parse_special_tokens=parse
        )
        prepare(options)
        assert IndexedDataset(tmp_path / "x_train").tokens.tolist().count(0) == separators


def test_without_validation_an_earlier_one_is_removed(prepared: tuple[Path, str], tmp_path: Path) -> None:
    directory, output = prepared
    for fraction, exists in ((0.2, True), (0.0, False)):
        prepare(
            PrepareOptions(
                str(tmp_path / "x"),
                [str(directory / "text.jsonl")],
                tokenizer=f"{output}_tokenizer",
                valid_fraction=fraction,
            )
        )
        assert (tmp_path / "x_valid.idx").exists() is exists
        assert (tmp_path / "x_valid.bin").exists() is exists


def test_own_outputs_in_an_input_directory_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text to read")
    for _ in range(2):
        found = prepare(PrepareOptions(str(tmp_path / "x"), [str(tmp_path)], train_tokenizer=257))
        assert found.facts.train.documents == 1
        assert found.facts.train.text_bytes == len("some text to read")


def test_a_corpus_that_changes_meanwhile_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    for change in ("other text", "text\n" * 1000, ""):
        path = tmp_path / "a.txt"
        path.write_text("a text")

        def touch(what: str, done: int, total: int, path: Path = path, change: str = change) -> None:
            if what == "reading":
                path.write_text(change)

        with pytest.raises(DataError, match="changed while it was being read"):
            prepare(PrepareOptions(str(tmp_path / "x"), [str(path)], train_tokenizer=300), touch)
        assert not list(tmp_path.glob("x*"))


def test_tokenizers_of_others(tmp_path: Path, prepared: tuple[Path, str]) -> None:
    _, output = prepared
    trained = json.loads(Path(f"{output}_tokenizer/tokenizer.json").read_text())
    trained["added_tokens"][0]["content"] = "</s>"
    trained["model"]["vocab"] = {
        ("</s>" if t == "<|endoftext|>" else t): i for t, i in trained["model"]["vocab"].items()
    }
    trained["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(trained))
    with pytest.raises(DataError, match=r"neither.*--eod-token"):
        load_tokenizer(tmp_path, None, False)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "</s>"}}')
    found = load_tokenizer(tmp_path, None, False)
    assert (found.end_of_document, found.end_of_document_id) == ("</s>", 0)
    assert len(found.tokenizer.encode("a text of more than three tokens").ids) > 3  # truncation is off
    assert load_tokenizer(tmp_path / "tokenizer.json", "a", False).end_of_document == "a"
    with pytest.raises(DataError, match=r"'\[SEP\]' is not in its vocabulary"):
        load_tokenizer(tmp_path, "[SEP]", False)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match="cannot be read"):
        load_tokenizer(tmp_path, None, False)


def test_mistakes_are_one_message_with_exit_code_2(
    tmp_path: Path, prepared: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    directory, output = prepared
    text, tokenizer = str(directory / "text.jsonl"), f"{output}_tokenizer"
    out = str(tmp_path / "x")
    (tmp_path / "only.txt").write_text("only one document")
    (tmp_path / "latin.txt").write_bytes(b"\xe9")
    (tmp_path / "mine.json").write_text('{"my": "file"}')
    (tmp_path / "none").mkdir()
    cases = [
        (["--output", out, "--tokenizer", tokenizer], "nothing to read"),
        ([text, "--output", out, "--tokenizer", str(tmp_path)], "tokenizer.json does not exist"),
        ([text, "--output", out, "--train-tokenizer", "100"], "at least 257"),
        ([text, "--output", out, "--train-tokenizer", "300", "--eod-token", "a"], "--eod-token"),
        ([text, "--output", out, "--tokenizer", tokenizer, "--valid-fraction", "1"], "below 1"),
        ([text, "--output", out, "--tokenizer", tokenizer, "--workers", "0"], "--workers 0"),
        ([text, "--output", f"{tmp_path}/", "--tokenizer", tokenizer], "give a prefix"),
        ([text, "--output", str(tmp_path / "mine"), "--tokenizer", tokenizer], "mine.json would be overwritten"),
        ([str(tmp_path / "gone"), "--output", out, "--tokenizer", tokenizer], "does not exist"),
        ([str(tmp_path / "none"), "--output", out, "--tokenizer", tokenizer], "no files"),
        ([str(tmp_path / "latin.txt"), "--output", out, "--tokenizer", tokenizer], "1 not UTF-8"),
        (
            [str(tmp_path / "only.txt"), "--output", out, "--tokenizer", tokenizer, "--valid-fraction", "0.5"],
            "whole documents",
        ),
    ]
    for arguments, message in cases:
        assert main(["prepare", *arguments]) == 2, arguments
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
        assert not list(tmp_path.glob("x*")), arguments
    assert (tmp_path / "mine.json").read_text() == '{"my": "file"}'
    with pytest.raises(ConfigError):
        prepare(PrepareOptions(out, [text]))


KILLED_AT = """
import os, signal, sys
from mdsp.data.prepare import PrepareOptions, prepare

left = int(sys.argv[1])

def counted(function):
    def call(*arguments, **options):
        global left
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
        return function(*arguments, **options)
    return call

os.replace, os.unlink = counted(os.replace), counted(os.unlink)
prepare(PrepareOptions(sys.argv[2], [sys.argv[3]], train_tokenizer=280, valid_fraction=0.4))
"""


def test_killed_between_any_two_steps_of_the_end_nothing_mixed_is_left(tmp_path: Path) -> None:
    """SIGKILL before each rename and removal, over an earlier result: readers find the old, the new, or nothing."""
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in LINES))
    output = str(tmp_path / "out" / "x")

    def contents() -> dict[str, bytes]:
        files = [p for p in Path(output).parent.rglob("*") if p.is_file() and p.suffix != ".partial"]
        return {str(p): p.read_bytes() for p in files}

    old = PrepareOptions(output, [str(tmp_path / "text.jsonl")], train_tokenizer=300, valid_fraction=0.1)
    step, code, outcomes = 0, -signal.SIGKILL, []
    while code == -signal.SIGKILL:
        prepare(old)
        before = contents()
        arguments = [sys.executable, "-c", KILLED_AT, str(step), output, str(tmp_path / "text.jsonl")]
        code = subprocess.run(arguments, check=False).returncode
        if contents() == before:
            outcomes.append("old")
        elif (facts := find_sidecar(f"{output}_train")) is not None and Path(f"{output}_train.idx").exists():
            outcomes.append("new")
            assert facts.vocab_size == 280
            assert IndexedDataset(f"{output}_train").n_tokens == facts.train.tokens
        else:
            outcomes.append("nothing")
            tokenizer = f"{output}_tokenizer/tokenizer.json"
            is_new_tokenizer = Path(tokenizer).read_bytes() != before[tokenizer]
            for split in ("train", "valid"):
                index = Path(f"{output}_{split}.idx")
                is_old_index = index.exists() and index.read_bytes() == before[str(index)]
                assert not (is_old_index and (is_new_tokenizer or split == "train"))
        step += 1
    assert code == 0
    assert sorted(set(outcomes)) == ["new", "nothing", "old"]
    assert outcomes == sorted(outcomes, key=["old", "nothing", "new"].index)
    assert len(outcomes) > 8


def test_the_command_does_not_import_torch(tmp_path: Path) -> None:
    """The standard library as a corpus would do too, but this stays small: a few of its files, one of them packed."""
    (tmp_path / "a.py.gz").write_bytes(gzip.compress(Path(os.__file__).read_bytes()))
    program = (
        "import sys\n"
        "from mdsp.cli import main\n"
        "code = main(sys.argv[1:])\n"
        "print('torch' in sys.modules, 'transformers' in sys.modules, code)\n"
    )
    arguments = ["prepare", str(tmp_path / "a.py.gz"), "--output", str(tmp_path / "x"), "--train-tokenizer", "300"]
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.splitlines()[-1] == "False False 0"
    assert IndexedDataset(tmp_path / "x_train").n_documents == 1
