"""Messages of callbacks and data modules name parameters; here they are rewritten with the flags of a command line."""

import re
import shlex
from collections.abc import Collection, Mapping

from recipes.runner.launch import flag_of

__all__ = ["ALIASES", "as_flags", "one_line"]

ALIASES = {
    "duration": "warmup",
    "steps": "accumulate",
    "interval": "save_every",
    "until": "freeze_until",
    "skip": "weights_skip",
}
"""Parameters of callbacks and functions whose flag has another name."""

# A Python literal: a string, brackets without brackets of the same kind in them, or what ends at a space or a comma.
_VALUE = r"""'[^']*'|"[^"]*"|\{[^}]*\}|\[[^\]]*\]|\([^)]*\)|[^\s,;:)\]'"]*[^\s,;:)\]'".]"""
_PARAMETER = re.compile(rf"`(?P<name>\w+)(?:=(?P<quoted>[^`]*))?`|(?<![\w-])(?P<bare>[a-z]\w*)=(?P<value>{_VALUE})")


def _flag(name: str, value: str | None) -> str:
    flag = flag_of(name)
    if value is None:
        return flag
    if value in ("True", "False"):
        return flag if value == "True" else flag_of(f"no_{name}")
    text = value[1:-1] if value[:1] in ("'", '"') and value[-1:] == value[:1] else value
    return f"{flag} {'null' if text == 'None' else shlex.quote(text)}"


def as_flags(message: str, flags: Collection[str], aliases: Mapping[str, str] | None = None) -> str:
    """A message with parameters written as flags, where they have one.

    Args:
        message: with parameters as ``name=value`` or in backticks.
        flags: the parameters that have a flag of their name.
        aliases: parameters whose flag has another name; a flag of the same name takes precedence.

    Example:
        >>> text = '`val_fraction` is 2.0; pass val_fraction=0.1, unfreeze={"fc": 3}, and `seed`, not other=1'
        >>> print(as_flags(text, {"val_fraction", "seed", "unfreeze"}))
        --val-fraction is 2.0; pass --val-fraction 0.1, --unfreeze '{"fc": 3}', and --seed, not other=1
        >>> as_flags("pass channels_last=True or flip=False.", {"channels_last", "flip"})
        'pass --channels-last or --no-flip.'
    """
    names = dict(aliases or {}) | {name: name for name in flags}

    def replace(found: re.Match[str]) -> str:
        name = names.get(found["name"] or found["bare"])
        return found[0] if name is None else _flag(name, found["quoted"] if found["name"] else found["value"])

    return _PARAMETER.sub(replace, message)


def _cut(text: str, longest: int) -> str:
    """A text without its middle where it is longer than this."""
    if len(text) <= longest:
        return text
    half = (longest - 5) // 2
    return f"{text[: longest - 5 - half]} ... {text[-half:]}"


def one_line(message: str, longest: int = 10_000, longest_word: int = 500) -> str:
    """A message in one line that shows on any terminal, since values of any kind and length may stand in it.

    Args:
        longest: characters. The commands in a message may be long, so it is a bound for hostile values only.
        longest_word: characters of a word; of longer ones, such as a value, the middle is left out.

    Example:
        >>> print(one_line("no file \x1b[31mred\\n"))
        no file \\x1b[31mred\\n
        >>> one_line("--lr " + "9" * 100 + " is not a number", longest_word=20)
        '--lr 99999999 ... 9999999 is not a number'
    """
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in message)
    return _cut(" ".join(_cut(word, longest_word) for word in shown.split(" ")), longest)
