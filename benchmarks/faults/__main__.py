"""``python -m benchmarks.faults``: see `benchmarks.faults.battery`."""

import sys

from benchmarks.faults.battery import main

if __name__ == "__main__":
    sys.exit(main())
