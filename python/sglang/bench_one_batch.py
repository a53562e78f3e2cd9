"""`python -m sglang.bench_one_batch`: time of one pass and one round on random weights, from a source tree."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "benchmark" / "bench_one_batch.py"


def main() -> int:
    """Run ``benchmark/bench_one_batch.py`` with the arguments of this command."""
    if not SCRIPT.is_file():
        print("error: benchmarks are not part of an installed package: run this in a source tree", file=sys.stderr)
        return 2
    sys.path.insert(0, str(SCRIPT.parent))  # the script's neighbours are its modules
    sys.argv[0] = str(SCRIPT)
    runpy.run_path(str(SCRIPT), run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main())
