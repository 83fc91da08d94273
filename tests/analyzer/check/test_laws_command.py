"""`analyzer laws`: all of them in a table, one with its whole text, both for a program."""

from __future__ import annotations

import json

from click.testing import CliRunner, Result

from gradtrace_analyzer.check.registry import all_laws
from gradtrace_analyzer.cli import analyzer


def told(*arguments: str) -> Result:
    return CliRunner().invoke(analyzer, ["laws", *arguments])


def test_all_laws_stand_in_a_table_in_the_order_of_the_chain() -> None:
    head, rule, *rows = told().stdout.splitlines()
    assert head.split("  ")[0] == "law" and head.endswith("meaning") and set(rule) == {"-", " "}
    assert [row.split()[0] for row in rows] == [law.name for law in all_laws()]
    [row] = [row for row in rows if row.startswith("wrapper_called ")]
    assert row.split(maxsplit=2)[1:] == [
        "warning",
        "backward pass          A model that DDP wraps is called through its wrapper: ...",
    ]
    assert max(map(len, rows)) <= 120


def test_law_is_told_with_its_whole_text_and_what_explains_it() -> None:
    assert told("reduction_is_mean").stdout == (
        "reduction_is_mean  error\n"
        "\n"
        "A reduced bucket is the mean of the ranks' buckets, within 4 eps sqrt(ranks) of the larger of the\n"
        "mean of their norms and its own, with eps of the bucket's dtype, at least 2^-23, and half the\n"
        "dtype's smallest number per rank and element. Torch's compressing hooks are held to what they\n"
        "promise: eps sqrt(ranks) of the dtype on the wire, two levels of a quantized range; PowerSGD,\n"
        "post-local SGD and hooks named by `--compressing` to nothing, and what they lose is told. It is read\n"
        "from sketches: their standard error of 0.18 scales the size of a real deviation, and makes none\n"
        "where there is none. Buckets of sparse gradients are not judged.\n"
        "\n"
        "It is judged by the bucket.\n"
        "In the chain of a step it stands after collectives_match.\n"
        "Broken in the same step, these explain it: collectives_match.\n"
    )
    assert told("data_differ").stdout.endswith("\n\nIt is judged by the step.\n")


def test_program_gets_all_laws_or_one_as_an_object() -> None:
    laws = json.loads(told("--format", "json").stdout)
    assert [law["law"] for law in laws] == [law.name for law in all_laws()]
    one = json.loads(told("gradients_equal", "--format", "json").stdout)
    assert one == laws[[law["law"] for law in laws].index("gradients_equal")]
    assert one == {
        "law": "gradients_equal",
        "severity": "error",
        "unit": "bucket or gradient",
        "meaning": "After a reduction all ranks of the group hold bit-equal buckets and gradients, and their "
        "optimizers see them so.",
        "after": ["reduction_is_mean"],
        "explained_by": ["collectives_match", "reduction_is_mean"],
    }


def test_unknown_law_is_one_sentence_that_names_those_there_are() -> None:
    result = told("gradients")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(
        "analyzer: there is no law 'gradients'; there are data_differ, "
    )
    assert result.stderr.count("\n") == 1
