"""Location of the cache folders, whose files can be computed again from the user's data."""

import os
from pathlib import Path


def cache_folder(*names: str) -> Path:
    """Return a folder below the user's cache folder, ``$XDG_CACHE_HOME`` or ``~/.cache``. It need not exist."""
    try:
        cache_home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    except RuntimeError:
        # A user without a home, as in some containers: below this path no folder can be created, so nothing is cached.
        cache_home = Path(os.devnull)
    return cache_home.joinpath("lightning-recipes", *names)
