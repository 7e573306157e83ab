import os
import sys

# Tests start processes by the hundred: without bytecode each would compile torch and Lightning anew, for seconds.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
