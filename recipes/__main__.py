"""Command that lists and starts recipes: ``lightning-recipes mnist`` is the same as ``python -m recipes.mnist``."""

import os
import sys
from runpy import run_module

from recipes.registry import find_recipes
from recipes.version import __version__


def _print_list(program: str) -> None:
    print(f"usage: {program} RECIPE [fit|validate|test|predict|verify|export] [flags]")  # noqa: T201
    print(f"       {program} list | goldens | --version\n")  # noqa: T201
    for name, summary in find_recipes().items():
        print(f"{name}: {summary}")  # noqa: T201
        print(f"  lightning-recipes {name} --help  or  python -m recipes.{name} --help")  # noqa: T201


def main() -> None:
    """Run the recipe named on the command line, or print the list of recipes."""
    program = "python -m recipes"
    args = sys.argv[1:]
    if __name__ != "__main__":
        program = "lightning-recipes"
        # A console command does not import from the current folder; the processes that it starts must not do so either.
        os.environ["PYTHONSAFEPATH"] = "1"
    name = args[0] if args else "list"
    if name in ("list", "-h", "--help"):
        _print_list(program)
        return
    if name == "--version":
        print(f"lightning-recipes {__version__}")  # noqa: T201
        return
    if name == "goldens":
        from recipes.goldens import main as compare_goldens  # Imported here, since it imports torch.

        sys.exit(compare_goldens(args[1:], program))
    recipes = find_recipes()
    if name not in recipes:
        print(f"error: there is no recipe {name!r}; expected list, goldens, {', '.join(recipes)}", file=sys.stderr)  # noqa: T201
        sys.exit(2)
    del sys.argv[1]  # The recipe's own command line begins with a command or a flag.
    run_module(f"recipes.{name}", {"PROGRAM": f"{program} {name}"}, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
