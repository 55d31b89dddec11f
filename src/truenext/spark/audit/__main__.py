"""The audit as a program for spark-submit, and for `python -m truenext.spark.audit`.

spark-submit --master yarn spark/audit/__main__.py DIR --out FOLDER
"""

import argparse
import sys
from datetime import datetime
from pathlib import Path

from truenext.errors import TruenextError
from truenext.spark.audit.audit import STUCK_SECONDS
from truenext.spark.audit.command import run_audit


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m truenext.spark.audit", description=__doc__)
    parser.add_argument("folders", metavar="DIR", nargs="+", help="a broker's data folder, or an address: s3a://...")
    parser.add_argument("--master")
    parser.add_argument("--since", type=datetime.fromisoformat)
    parser.add_argument("--queue")
    stuck_help = "seconds without a dispatch after which a ready message with a free consumer counts as stuck"
    parser.add_argument("--stuck", dest="stuck_seconds", type=float, default=STUCK_SECONDS, help=stuck_help)
    parser.add_argument(
        "--stages",
        metavar="DIR",
        action="append",
        default=[],
        help="folder into which a service of stages wrote its events (truenext stages run --events); may be repeated",
    )
    state_help = "folder that keeps the end of this audit: the next one begins there"
    parser.add_argument("--state", type=Path, help=state_help)
    parser.add_argument("--out", type=Path)
    try:
        verdicts = run_audit(**vars(parser.parse_args()))
    except TruenextError as error:
        print(f"truenext: {error}", file=sys.stderr)
        return 2
    return 0 if all(verdict.has_contract_held for verdict in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
