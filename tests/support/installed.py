"""A cache of the installed entry points: each Trainer asks all packages for them, which takes as long as a tiny run."""

import functools
import importlib.metadata

importlib.metadata.entry_points = functools.cache(importlib.metadata.entry_points)
