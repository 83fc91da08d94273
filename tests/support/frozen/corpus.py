"""The kept recordings, questions and answers: where they lie, how they are made, read and asked again.

tests/frozen/accuracy.zip, whole.zip    runs (see `packing`): the pairs of `scripts/accuracy`, the jobs of tests/whole
tests/frozen/questions.jsonl            what is asked of them, a line each
tests/frozen/answers.zst                what was said: lines of JSON, by the question's name
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import zstandard

from gradtrace_schemas import layout
from support.frozen.judging import (
    FORMATS,
    JSON,
    Answer,
    Question,
    judge,
    line_of,
    prepare,
    question_of,
)
from support.frozen.packing import pack, unpack
from support.frozen.scrubbing import claim_journals, scrub

CORPUS = Path(__file__).resolve().parents[2] / "frozen"
PACKS = ("accuracy", "whole")
QUESTIONS, ANSWERS = "questions.jsonl", "answers.zst"
ABOUT = "about.json"  # see `capture`
PAIRS = "pairs.jsonl"  # see `support.accuracy.measuring`, which takes torch along

# Of runs that a test kills at random moments, one of so many is kept: they are large, and much alike.
SAMPLED = {"whole/test_kills.py::test_kill_at_a_random_moment_loses_no_record_and_invents_none": 3}

# Of how many pairs of `scripts/accuracy` one is asked for its text as well: it costs as much as the JSON, whose
# explanation has the sentences.
TEXT_EVERY = 5

Answers = dict[str, dict[str, Answer]]

# Questions about one run, with the table that must have rows where not every run has an answer.
_OF_A_RUN: tuple[tuple[tuple[str, ...], str | None], ...] = (
    (("check",), None),
    (("failures",), None),
    (("timing",), None),
    (("timing", "--buckets"), "buckets"),
    (("timing", "--stages"), "stage_events"),
)


def questions(corpus: Path = CORPUS) -> list[Question]:
    """All that is asked."""
    return [question_of(line) for line in (corpus / QUESTIONS).read_text().splitlines()]


def answers(corpus: Path = CORPUS) -> Answers:
    """All that was said, by the question's name; empty where nothing is kept."""
    if not (corpus / ANSWERS).exists():
        return {}
    text = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompress(
        (corpus / ANSWERS).read_bytes()
    )
    found = (json.loads(line) for line in text.decode().splitlines())
    return {name: {f: Answer(**a) for f, a in by_format.items()} for name, by_format in found}


def keep_answers(found: Mapping[str, Mapping[str, Answer]], corpus: Path = CORPUS) -> None:
    """Write them down, sorted, so that equal answers are equal bytes."""
    lines = (
        json.dumps([name, {f: asdict(a) for f, a in sorted(found[name].items())}])
        for name in sorted(found)
    )
    text = "".join(f"{line}\n" for line in lines).encode()
    parameters = zstandard.ZstdCompressionParameters.from_level(19, window_log=27, enable_ldm=True)
    data = zstandard.ZstdCompressor(compression_params=parameters).compress(text)
    (corpus / ANSWERS).write_bytes(data)


@contextlib.contextmanager
def unpacked(corpus: Path = CORPUS, processes: int = 2) -> Iterator[Path]:
    """A folder with all runs, while the block lasts."""
    with tempfile.TemporaryDirectory(prefix="frozen-") as name:
        place = Path(name).resolve()
        packs = [name for name in PACKS if (corpus / f"{name}.zip").exists()]
        jobs = [(corpus / f"{name}.zip", place / name) for name in packs]
        if processes == 1:
            for job in jobs:
                unpack(*job)
        else:
            with multiprocessing.get_context("spawn").Pool(processes) as pool:
                pool.starmap(unpack, jobs, chunksize=1)
        claim_journals(place)
        yield place


def asked(
    place: Path, wanted: Sequence[Question], processes: int = 2
) -> Iterator[tuple[Question, dict[str, Answer]]]:
    """The answers as they come, judged side by side; by one alone in this process, which is then good for no more."""
    if processes == 1:
        prepare(str(place))
        yield from map(_judged, wanted)
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(processes, prepare, (str(place),)) as pool:
        yield from pool.imap_unordered(_judged, wanted, chunksize=4)


def _judged(question: Question) -> tuple[Question, dict[str, Answer]]:
    return question, judge(question)


def record(
    accuracy: Path, whole: Path, folders: Sequence[str], place: Path, corpus: Path = CORPUS
) -> None:
    """Make packs and questions of what `scripts/accuracy --recordings` and `pytest --keep-runs` left.

    `folders` are the beginnings of paths of this machine; the runs lie under `place` as they will be unpacked.
    """
    corpus.mkdir(parents=True, exist_ok=True)
    found: dict[str, Question] = {}
    for name, likened in (
        ("accuracy", _accuracy(accuracy, folders, place / "accuracy", found)),
        ("whole", _whole(whole, folders, place / "whole", found)),
    ):
        runs = sorted(_runs(place / name), key=lambda run: (run in likened, _natural(run)))
        pack(place / name, runs, likened, corpus / f"{name}.zip")
    (corpus / QUESTIONS).write_text("".join(f"{line_of(q)}\n" for q in found.values()))


def _accuracy(
    source: Path, folders: Sequence[str], place: Path, found: dict[str, Question]
) -> dict[str, str]:
    """The pairs; which baseline a candidate is much like."""
    likened: dict[str, str] = {}
    for number, line in enumerate((source / PAIRS).read_text().splitlines()):
        pair = json.loads(line)
        about = f"accuracy: {pair['about']}"
        for run in pair["runs"]:
            if not (place / run).exists():
                scrub(source / run, place / run, folders, ())
                _ask_of_a_run(found, place, run, Question((), about, 0, (JSON,)))
        baseline, candidate = pair["runs"]
        likened[candidate] = baseline
        words = ("diff", *pair["options"], f"accuracy/{baseline}", f"accuracy/{candidate}")
        _ask(found, Question(words, about, 0, (JSON,) if number % TEXT_EVERY else FORMATS))
    return likened


def _whole(
    source: Path, folders: Sequence[str], place: Path, found: dict[str, Question]
) -> dict[str, str]:
    """The runs of the tests and what was asked of them. Of a run that lives, of which a test asks the same again until
    it has its answer, the last is kept."""
    abouts = {p.parent.name: json.loads(p.read_text()) for p in sorted(source.glob(f"*/{ABOUT}"))}
    notes = [
        json.loads(line)
        for p in sorted(source.glob("*.jsonl"))
        for line in p.read_text().splitlines()
    ]
    latest: dict[tuple[str, ...], dict[str, Any]] = {}
    for note in notes:
        original = [_source(abouts, w) if w.startswith("@") else w for w in note["arguments"]]
        latest[(note["test"], *original)] = note
    used = {_folder(w) for note in latest.values() for w in note["arguments"] if w.startswith("@")}
    # What was asked about earlier and is no more; what nobody asked about is kept.
    outdated = {_folder(w) for note in notes for w in note["arguments"] if w.startswith("@")} - used
    outdated |= _not_sampled(abouts)
    names: dict[str, str] = {}
    order = sorted(set(abouts) - outdated, key=lambda f: (abouts[f]["test"], abouts[f]["now_ns"]))
    for number, folder in enumerate(order):
        about = abouts[folder]
        (run,) = (p for p in (source / folder).iterdir() if p.is_dir())
        names[folder] = f"{number:04}/{run.name}"
        scrub(run, place / names[folder], folders, about["living"])
        origin = about["test"] or f"a job of {'/'.join(Path(about['source']).parts[-2:])}"
        like = Question((), origin, about["now_ns"], (JSON,))
        _ask_of_a_run(found, place, names[folder], like)
    likened: dict[str, str] = {}
    for note in latest.values():
        if any(_folder(w) not in names for w in note["arguments"] if w.startswith("@")):
            continue
        runs = [names[_folder(w)] for w in note["arguments"] if w.startswith("@")]
        words = [
            f"whole/{names[_folder(w)]}" if w.startswith("@") else w for w in note["arguments"]
        ]
        now_ns = max(abouts[_folder(w)]["now_ns"] for w in note["arguments"] if w.startswith("@"))
        _ask(found, Question(tuple(words), note["test"], now_ns))
        is_first = len(runs) > 1 and runs[0] not in likened and runs[1] not in likened.values()
        if is_first and runs[0] != runs[1]:
            likened[runs[1]] = runs[0]
    of_file: dict[str, str] = {}
    for kept, name in names.items():
        if name not in likened:
            first = of_file.setdefault(abouts[kept]["test"].split("::")[0], name)
            if first != name and name not in likened.values():
                likened[name] = first
    return likened


def _ask(found: dict[str, Question], question: Question) -> None:
    """Unless it was asked before; what a test asks is asked as it stands, in both formats."""
    before = found.get(question.name)
    if before is None or len(before.formats) < len(question.formats):
        found[question.name] = question


def _ask_of_a_run(found: dict[str, Question], place: Path, run: str, like: Question) -> None:
    """What is asked of every run; `like` has all but the command."""
    for words, table in _OF_A_RUN:
        if table is None or (place / run / table).is_dir():
            _ask(found, replace(like, arguments=(*words, f"{place.name}/{run}")))


def _not_sampled(abouts: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """Folders of runs of which others stand for them."""
    left_out: set[str] = set()
    for test, every in SAMPLED.items():
        mine = [folder for folder in sorted(abouts) if abouts[folder]["test"].startswith(test)]
        sources = list(dict.fromkeys(abouts[folder]["source"] for folder in mine))
        kept = set(sources[::every])
        left_out |= {folder for folder in mine if abouts[folder]["source"] not in kept}
    return left_out


def _source(abouts: Mapping[str, Mapping[str, Any]], word: str) -> str:
    return str(abouts[_folder(word)]["source"])


def _folder(word: str) -> str:
    """That of a copy, of a word `@folder/name`."""
    return word[1:].split("/")[0]


def _runs(place: Path) -> Iterable[str]:
    """Folders of runs, relative."""
    known = {layout.RUN_FILE, layout.RANKS, layout.JOURNALS}
    found = {path.parent for name in known for path in place.rglob(name)}
    return [str(path.relative_to(place)) for path in found]


def _natural(name: str) -> tuple[tuple[int, str], ...]:
    """Numbers in order."""
    return tuple((len(word), word) for word in name.replace("-", "/").split("/"))
