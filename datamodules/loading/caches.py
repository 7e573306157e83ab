"""Where this package keeps what it has made from the data of users and can make again."""

import os
from pathlib import Path


def cache_folder(*names: str) -> Path:
    """A folder of this package below the user's folder for caches: ``$XDG_CACHE_HOME``, ``~/.cache`` by default.

    A user without a home, as in some containers, has none: there it is a folder that cannot be made.
    """
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    except RuntimeError:
        home = Path(os.devnull)
    return home.joinpath("lightning-recipes", *names)
