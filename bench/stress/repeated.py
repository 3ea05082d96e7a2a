"""What the cases of bench.stress.faults write, as digests: two processes must print the same.

    python -m bench.stress.repeated --work FOLDER --threads 2 sft "index, build"

The folder is used by one process at a time; paths in it are part of what is written.
"""

import argparse
import hashlib
import json
import os
from pathlib import Path

from bench.stress import fault_runs
from bench.stress.fault_cases import NAMED, PLACE, Server, fixtures
from bench.stress.fault_runs import preload, run
from bench.stress.folder_content import content


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=list(NAMED))
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args(argv)
    os.environ["GOOGLE_API_KEY"] = "key"
    preload()
    fault_runs.THREADS = given.threads
    given.work.mkdir(parents=True, exist_ok=True)
    made, place = fixtures(given.work, brief="collect, self" not in given.cases), given.work / PLACE
    port = given.work / "port"  # of the server that is asked: replies are cached under its address
    server = Server(int(port.read_text()) if port.exists() else 0)
    port.write_text(str(server.http.server_port))
    found = {}
    for name in given.cases:
        case = NAMED[name]
        case.begin(made, place)
        ended = run(case.command, case.arguments(made, place, server.url), place, given.work / "run.log")
        assert ended.status == 0, f"{name}: {ended.said}"
        held = content(place).items()
        found[name] = {file: hashlib.sha256(repr(value).encode()).hexdigest()[:16] for file, value in held}
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
