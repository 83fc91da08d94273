"""Words of the laws."""

from gradtrace_analyzer.words.nouns import bucket_phrase, listed


def test_parameters_without_a_name_are_said_so() -> None:
    assert listed([None]) == "a parameter without a name"
    assert (
        bucket_phrase(2, 1, [None, "b"])
        == "Step 2, bucket 1 (a parameter without a name and 1 more)"
    )
