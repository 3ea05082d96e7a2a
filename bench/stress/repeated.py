"""Prints digests of the files that the cases of bench.stress.faults write: two processes must print the same.

    python -m bench.stress.repeated --work FOLDER --threads 2 sft "index, build"

Both processes must use the same folder, one after the other, because written files contain its path.
"""

import argparse
import hashlib
import json
import os
from pathlib import Path

from bench.stress import fault_runs
from bench.stress.fault_cases import CASES_BY_NAME, OUTPUT_NAME, Server, fixtures
from bench.stress.fault_runs import preload, run
from bench.stress.folder_content import content

CASE_WITH_LEARNED_ADAPTER = "collect, self"  # the case that needs the fixtures with more training
DIGEST_DIGITS = 16


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=list(CASES_BY_NAME))
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=1)
    flags = parser.parse_args(argv)
    os.environ["GOOGLE_API_KEY"] = "key"  # any key will do: `Server` stands in for Gemini
    preload()
    fault_runs.THREADS = flags.threads
    flags.work.mkdir(parents=True, exist_ok=True)
    fixture_folder = fixtures(flags.work, brief=CASE_WITH_LEARNED_ADAPTER not in flags.cases)
    output = flags.work / OUTPUT_NAME
    # Replies are cached under the server's address, so the second process must use the port of the first.
    port_file = flags.work / "port"
    server = Server(int(port_file.read_text()) if port_file.exists() else 0)
    port_file.write_text(str(server.http.server_port))
    digests = {}
    for name in flags.cases:
        case = CASES_BY_NAME[name]
        case.reset(fixture_folder, output)
        arguments = case.arguments(fixture_folder, output, server.url)
        result = run(case.command, arguments, folder=output, log=flags.work / "run.log")
        assert result.status == 0, f"{name}: {result.output}"
        digests[name] = {file: digest(value) for file, value in content(output).items()}
    print(json.dumps(digests))
    return 0


def digest(value: object) -> str:
    """Returns the first digits of the SHA-256 of a file's content."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:DIGEST_DIGITS]


if __name__ == "__main__":
    raise SystemExit(main())
