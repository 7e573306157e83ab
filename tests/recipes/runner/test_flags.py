from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from datamodules import ImageFolderDataModule
from datamodules.errors import UserError
from recipes.resnet import ResNetFineTuner
from recipes.runner.command import flags_text, type_name
from recipes.runner.flags import FlagGroup, FlagParser, ParsedArguments, Request, RunClasses, check_request


def given(parser: FlagParser, args: list[str]) -> SimpleNamespace:
    """All settings of a command line, with the defaults."""
    return SimpleNamespace(**{**parser.defaults(), **parser.parse(args).settings})


@dataclass
class Engine:
    """An engine.

    Args:
        seed: of everything.
        power: in watts.
        kind: what burns.
    """

    seed: int = 1
    power: float = 2.5
    kind: Literal["gas", "oil"] = "gas"


@dataclass
class Wheels:
    """Wheels.

    Args:
        seed: of everything.
        spare_wheels: how many more.
        turning: whether they turn.
        tests: how many, or one.
    """

    seed: int = 1
    spare_wheels: int | None = None
    turning: bool = False
    tests: int | bool = False
    brakes: bool | Literal["drum", "disc"] = True


@pytest.fixture
def parser() -> FlagParser:
    return FlagParser([FlagGroup("Engine", Engine), FlagGroup("Wheels", Wheels)], "prog")


def test_classes_share_one_flag_where_they_share_a_name(parser):
    config = {**parser.defaults(), **parser.parse(["--seed", "7"]).typed}
    assert parser.select(config, "Engine")["seed"] == parser.select(config, "Wheels")["seed"] == 7


@pytest.mark.parametrize("flag", ["--spare-wheels", "--spare_wheels"])
def test_dashes_mean_the_same_as_underscores(parser, flag):
    assert given(parser, [flag, "2"]).spare_wheels == 2
    assert given(parser, [f"{flag}=3"]).spare_wheels == 3


@pytest.mark.parametrize(
    ("args", "brakes"), [(["--brakes", "disc"], "disc"), (["--brakes", "--turning"], True), (["--no-brakes"], False)]
)
def test_a_switch_may_have_names_as_its_values(parser, args, brakes):
    assert given(parser, args).brakes == brakes


@pytest.mark.parametrize(
    ("args", "turning", "tests"),
    [
        (["--turning"], True, False),
        (["--turning", "--tests"], True, True),
        (["--turning", "false", "--tests", "3"], False, 3),
        (["--no-turning", "--tests=2"], False, 2),
    ],
)
def test_a_switch_needs_no_value(parser, args, turning, tests):
    config = given(parser, args)
    assert (config.turning, config.tests) == (turning, tests)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--powr", "3"], "there is no flag --powr; did you mean --power?"),
        (["--zzzzzz", "3"], "there is no flag --zzzzzz; --help-all lists the flags"),
        (["--power", "strong"], "--power strong: expected FLOAT"),
        (["--kind", "coal"], "--kind coal: expected gas|oil"),
        (["--spare-wheels", "1.5"], "--spare-wheels 1.5: expected INT"),
        (["--power", "--turning"], "--power needs a value: FLOAT"),
        (["--power", "3", "--config", "--turning"], "--config needs a value: a file of settings"),
        (["--config", "power: 3"], "there is no file power: 3"),
        (["-power", "3"], "flags begin with two hyphens; did you mean --power?"),
        (["—power", "3"], "flags begin with two hyphens; did you mean --power?"),
        (["–batch-size=3"], "flags begin with two hyphens; did you mean --batch-size?"),
        (["--seed", "1e3"], "--seed 1e3: expected INT"),
        (["--spare-wheels=1e3"], "--spare-wheels 1e3: expected INT"),
        (["--power", "3", "test"], "'test' is neither a flag nor the value of one; a command such as test comes first"),
    ],
)
def test_a_mistake_is_answered_in_one_line(parser, args, message):
    with pytest.raises(UserError) as caught:
        parser.parse(args)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("power: strong\n", ": power: strong: expected FLOAT"),
        ("powr: 3\n", ": there is no setting powr; did you mean power?"),
        ("kind: gas\nlearning_rate: 3\n", ": there is no setting learning_rate; did you mean lr?"),
        ("[a\n", "line 2: cannot be read as a file of settings"),
        ("power: 1\n\npower: 2\n", "line 3: power is also in line 1; remove one of them"),
        ("plan:\n  1: 2\n  3: many\n", ": plan: {1: 2, 3: 'many'}: expected INT|DICT"),
    ],
)
def test_a_mistake_in_the_file_is_named_with_its_place(tmp_path, text, message):
    @dataclass
    class Run:
        """A run.

        Args:
            lr: learning rate.
            plan: a number, or several.
        """

        lr: float = 1.0
        plan: int | dict[int, int] = 1

    parser = FlagParser([FlagGroup("Engine", Engine), FlagGroup("Run", Run)], "prog")
    file = tmp_path / "settings.yaml"
    file.write_text(text)
    with pytest.raises(UserError) as caught:
        parser.parse(["--config", str(file)])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError) as caught:
        parser.parse(["--config", str(file), "--power", "3"])
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("args", "found"),
    [
        ("--power 9 --config one", (9, "oil", 4)),
        ("--config one --config two", (8, "oil", None)),
        ("--config two --config=one", (7, "oil", 4)),
        ("--power 9 --config one --turning --config two --seed 3", (9, "oil", None)),
        ("--config=one --spare-wheels 2 --config=two", (8, "oil", 2)),
        ("--config one --kind gas --config one", (7, "gas", 4)),
    ],
)
def test_the_command_line_wins_over_the_last_file(parser, tmp_path, monkeypatch, args, found):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one").write_text("power: 7\nkind: oil\nspare_wheels: 4\n")
    (tmp_path / "two").write_text("power: 8\nspare_wheels: null\n")
    config = given(parser, args.split())
    assert (config.power, config.kind, config.spare_wheels) == found


def test_the_help_has_a_line_per_flag(parser):
    lines = flags_text(parser.help_groups()).splitlines()
    assert "  --power FLOAT                   in watts (2.5)" in lines
    assert "  --kind gas|oil                  what burns (gas)" in lines
    assert sum("--seed" in line for line in lines) == 1


def test_types_are_named_as_the_help_names_them():
    assert type_name(int | str | None) == "INT|TEXT"
    assert type_name(list[int]) == "LIST"


def test_a_whole_number_stays_one_where_a_share_is_possible():
    # Equal unions are one object: fastai's Optional[Union[float, int]] turns Lightning's Optional[Union[int, float]].
    class Trainer:
        def __init__(
            self, limit: float | int | None = None, sizes: float | int = 0.5, every: Interval = None
        ) -> None: ...

    parser = FlagParser([FlagGroup("Trainer", Trainer)])
    values = given(parser, ["--limit", "1", "--sizes", "2"])
    assert [type(values.limit), type(values.sizes)] == [int, int]
    assert values.limit == 1
    shares = given(parser, ["--limit=1.0", "--sizes=0.5", "--every=00:00:30:00"])
    assert [type(shares.limit), type(shares.sizes), shares.every] == [float, float, "00:00:30:00"]


Interval = int | float | str | timedelta | dict[str, int] | None


@dataclass
class Cargo:
    """What is carried.

    Args:
        files: one or several.
        weight: in kilograms.
    """

    files: list[str] | str | None = None
    weight: str = "0"


def test_a_list_takes_its_values_as_a_shell_expands_a_pattern():
    parser = FlagParser([FlagGroup("Cargo", Cargo)], "prog")
    assert parser.parse(["--files", "a b.de", "c.de", "--weight", "2"]).typed["files"] == ["a b.de", "c.de"]
    assert parser.parse(["--files", "[a.de, c.de]"]).typed["files"] == ["a.de", "c.de"]
    assert parser.parse(["--files", "a.de"]).typed["files"] == "a.de"
    with pytest.raises(UserError, match="c"):
        parser.parse(["--weight", "2", "c"])
    # With arguments of its own a command takes all but the first value.
    assert parser.parse(["--files", "a.de", "c.de"], takes_inputs=True).inputs == ["c.de"]


@pytest.mark.parametrize(("command", "file_format"), [("validate", None), ("export", "onnx")])
def test_tta_is_rejected_by_commands_that_do_not_use_it(command, file_format):
    classes = RunClasses(ResNetFineTuner, ImageFolderDataModule)
    settings = {**classes.parser("prog").defaults(), "ckpt": "best.ckpt", "format": file_format, "tta": True}
    with pytest.raises(UserError, match="--tta is for test and predict; leave it out"):
        check_request(Request(command, ParsedArguments({"tta": True}, {})), settings, classes)
    # The setting of a saved run: validate uses its checkpoint.
    check_request(Request(command, ParsedArguments({}, {})), settings, classes)


@dataclass
class Trailer:
    """What is pulled.

    Args:
        load: in kilograms, or what it is.
    """

    load: Any


@pytest.mark.parametrize(("passed", "is_missing"), [({}, True), ({"load": None}, False), ({"load": 0}, False)])
def test_null_is_a_value_only_if_the_user_passes_it(passed, is_missing):
    parser = FlagParser([FlagGroup("Trailer", Trailer)], "prog")
    with pytest.raises(UserError, match="has no default") if is_missing else nullcontext():
        parser.check_required(parser.defaults() | passed, passed)
