"""The arithmetic of a run that is cut into processes and micro-batches: a part of the table of combinations.

Batch normalization leaves one freedom: a layer sees one forward pass at a time ("ghost batches": Hoffer et al., 2017).
For the network with BatchNorm the plain loop therefore makes one forward pass for each micro-batch, and with SyncBN one
for those that all processes hold in the same step. The token model has no such layer. Of 29 samples five are left for
the last update, in three micro-batches of which the last has one, so that of four processes one has none.

That rows of equal micro-batches have equal bits is shown elsewhere; here is that each of them is right.
"""

from pathlib import Path

from tests.end_to_end.test_combinations import judge, run, settings_of
from tests.support.combinations import PLAIN

BOUNDS = {"float32": 1e-5, "float64": 1e-12}
SPLITS = [
    PLAIN | {"split": split, "dtype": dtype} | network
    for split in ("1x1", "1x4", "2x2", "4x1")
    for network in ({}, {"SyncBN": "on"}, {"network": "tokens"})
    for dtype in BOUNDS
]


def test_a_split_run_equals_plain_torch(tmp_path: Path) -> None:
    print("\nLargest relative error of a final weight or buffer, by processes and micro-batches of an update")
    lives = run(dict(enumerate(SPLITS)), tmp_path)
    for number, row in enumerate(SPLITS):
        gap, problems = judge(row, lives[number])
        print(f"{gap:.0e}  {settings_of(row) or '1x1'}")
        assert not problems
        assert gap <= BOUNDS[row["dtype"]], row
