"""Runs random scripts and cuts those that fail down to what it takes.

python -m tests.random_scripts 0 200              the scripts of seeds 0 to 199, on one process
python -m tests.random_scripts 0 200 --ranks 2
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Sequence

from tests.random_scripts.compare import case_of, compare
from tests.random_scripts.draw import Action, told
from tests.random_scripts.sides import Case


def failure(case: Case, script: Sequence[Action]) -> Exception | None:
    """What ``compare`` raises."""
    try:
        compare(case, script)
    except Exception as error:
        return error
    return None


def cut_down(case: Case, script: list[Action], kind: type[Exception]) -> list[Action]:
    """A shorter script that fails with an error of the same ``kind``."""
    size = len(script) // 2
    while size:
        place = 0
        while place < len(script):
            shorter = script[:place] + script[place + size :]
            if type(failure(case, shorter)) is kind:
                script = shorter
            else:
                place += size
        size //= 2
    return script


def main() -> None:
    """Run the scripts that the command line asks for, and print those that fail, cut down."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("first", type=int)
    parser.add_argument("end", type=int)
    parser.add_argument("--ranks", type=int, default=1)
    args = parser.parse_args()
    n_failed = 0
    for seed in range(args.first, args.end):
        case, script = case_of(seed, args.ranks)
        error = failure(case, script)
        if error is None:
            continue
        n_failed += 1
        script = cut_down(case, script, type(error))
        error = failure(case, script) or error
        lines = [f"seed {seed}: {case}", *map(told, script), *traceback.format_exception(error)[-2:]]
        print("\n    ".join(lines), flush=True)
    print(f"{n_failed} of {args.end - args.first} scripts failed")
    sys.exit(min(n_failed, 1))


if __name__ == "__main__":
    main()
