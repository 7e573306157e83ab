"""Lines about the data can be written wherever a log goes."""

from datamodules.notes import warn


def test_a_name_in_another_encoding_is_escaped(caplog) -> None:
    warn("two files: %s and %s", "\udce9.png", "é.png")
    assert caplog.messages == ["two files: \\udce9.png and é.png"]
