"""Randomised load on small engines for a long time: every answer is held to one given alone, memory must stay flat.

python scripts/soak.py --minutes 30
python scripts/soak.py --minutes 1 --seed 8      # other requests in another order
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "test"))

from fixtures.soak import soak

MAX_GROWTH_BYTES = 48e6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    report = soak(60 * args.minutes, args.seed, say=lambda text: print(text, flush=True))
    print(report)
    if report.growth_bytes > MAX_GROWTH_BYTES:
        print(f"memory grew by {report.growth_bytes / 1e6:.0f} MB", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
