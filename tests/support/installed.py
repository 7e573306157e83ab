"""What is installed is looked up once in a process: each Trainer asks it of all packages, which takes as long as a run."""

import functools
import importlib.metadata

importlib.metadata.entry_points = functools.cache(importlib.metadata.entry_points)
