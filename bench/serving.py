"""Tests a running server with simultaneous questions, and with a crowd of clients of which some misbehave.

    python -m r3lite.serve ... --requests-per-minute 1000000 &
    python -m bench.serving --mode search --questions data/world/test.jsonl

First 16 questions are asked one after another, and then at once. Prints how many answers are the same, and how much
faster the questions were answered at once.

Then 1,000 requests are sent, up to 16 at a time. Of these 5 % disconnect, 5 % are too large and 5 % are malformed.
Prints the number of requests with each status, what the server's health page tells of its requests, and the server's
memory before and after (with --pid, on Linux).
"""

import argparse
import asyncio
import json
import os
import random
import time
from collections import Counter
from pathlib import Path

import httpx2 as httpx

SIMULTANEOUS = 16  # questions or requests at a time
WARM_UP_REQUESTS = 300  # of the crowd, before its memory is measured
CROWD_REQUESTS = 1000
CROWD_QUESTIONS = 64  # questions that the crowd's requests draw from
DISCONNECTING_SHARE = 0.05  # of the crowd's requests
LARGE_SHARE = 0.05
MALFORMED_SHARE = 0.05
LARGE_QUERY = "x" * (1 << 20)
MALFORMED_BODIES = ("{", "[]", '{"query": 5}', '{"mode": "chat"}', '{"query": "\\ud800"}', "[" * 9999)
KIB_PER_MIB = 1024
SETTLING_SECONDS = 2  # give the server time to notice disconnections
UTIME_FIELD = 11  # index of `utime` in /proc/PID/stat after the command's name; `stime` follows


def resident(pid: int | None) -> float:
    """Returns the resident memory of a process in MiB (Linux only), or nan without a pid."""
    if pid is None:
        return float("nan")
    line = next(x for x in Path(f"/proc/{pid}/status").read_text().splitlines() if x.startswith("VmRSS"))
    return int(line.split()[1]) / KIB_PER_MIB


def computed(pid: int | None) -> float:
    """Returns the CPU seconds that a process has used so far (Linux only), or nan without a pid.

    On a busy machine they say more about the cost of an answer than wall-clock time does.
    """
    if pid is None:
        return float("nan")
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    ticks = int(fields[UTIME_FIELD]) + int(fields[UTIME_FIELD + 1])
    return ticks / os.sysconf("SC_CLK_TCK")


async def answer(client: httpx.AsyncClient, question: str, mode: str) -> str:
    """Asks the server a question, and returns all that it wrote in answer."""
    reply = await client.post("/generate", json={"query": question, "mode": mode})
    reply.raise_for_status()
    return reply.json()["reasoning_trace"]


async def at_once(client: httpx.AsyncClient, questions: list[str], mode: str, pid: int | None) -> None:
    """Asks the questions one after another and then at once, and prints a comparison of the answers and times."""
    await asyncio.gather(*(answer(client, question, mode) for question in questions))  # the server allocates its caches
    clocks = [read_clocks(pid)]
    answers_alone = [await answer(client, question, mode) for question in questions]
    clocks.append(read_clocks(pid))
    answers_together = await asyncio.gather(*(answer(client, question, mode) for question in questions))
    clocks.append(read_clocks(pid))
    equal_answers = sum(alone == together for alone, together in zip(answers_alone, answers_together, strict=True))
    print(f"{equal_answers} of {len(questions)} the same")
    for clock in ("by the clock", "of the server's processor"):
        start, middle, end = (times[clock] for times in clocks)
        seconds_alone = middle - start
        seconds_together = end - middle
        speedup = seconds_alone / seconds_together
        print(f"seconds {clock}: {seconds_alone:.1f} alone, {seconds_together:.1f} together, {speedup:.1f} x")


def read_clocks(pid: int | None) -> dict[str, float]:
    """Returns the wall-clock time and the server's CPU time now, in seconds, by their names in the output."""
    return {"by the clock": time.perf_counter(), "of the server's processor": computed(pid)}


async def send_request(client: httpx.AsyncClient, rng: random.Random, questions: list[str], mode: str) -> str:
    """Sends a random request of the crowd; returns its HTTP status, "gone" if it disconnected, or the error's name."""
    question = rng.choice(questions)
    draw = rng.random()
    try:
        if draw < DISCONNECTING_SHARE:
            async with client.stream(
                "POST", "/generate", json={"query": question, "mode": mode, "stream": True}
            ) as reply:
                if not reply.is_success:
                    return str(reply.status_code)
                async for _ in reply.aiter_lines():
                    break
                return "gone"
        if draw < DISCONNECTING_SHARE + LARGE_SHARE:
            reply = await client.post("/generate", json={"query": LARGE_QUERY})
        elif draw < DISCONNECTING_SHARE + LARGE_SHARE + MALFORMED_SHARE:
            body = rng.choice(MALFORMED_BODIES)
            reply = await client.post("/generate", content=body, headers={"content-type": "application/json"})
        else:
            stream = rng.random() < 0.5  # half of the replies, at random
            reply = await client.post("/generate", json={"query": question, "mode": mode, "stream": stream})
        return str(reply.status_code)
    except httpx.HTTPError as error:
        return type(error).__name__


async def crowd(client: httpx.AsyncClient, questions: list[str], mode: str, pid: int | None) -> None:
    """Sends the crowd's requests, and prints their statuses, the server's health and its memory."""
    rng = random.Random(0)
    gate = asyncio.Semaphore(SIMULTANEOUS)

    async def send_through_gate() -> str:
        async with gate:
            return await send_request(client=client, rng=rng, questions=questions, mode=mode)

    async def send_requests(count: int) -> Counter:
        return Counter(await asyncio.gather(*(send_through_gate() for _ in range(count))))

    await send_requests(WARM_UP_REQUESTS)
    memory_before = resident(pid)
    start = time.perf_counter()
    statuses = await send_requests(CROWD_REQUESTS)
    seconds = time.perf_counter() - start
    memory_after = resident(pid)
    await asyncio.sleep(SETTLING_SECONDS)
    health = (await client.get("/api/health")).json()["requests"]
    print(
        f"{dict(statuses)} in {seconds:.0f} s; {health}; "
        f"memory {memory_before:.1f} -> {memory_after:.1f} MiB ({memory_after / memory_before - 1:+.2%})"
    )


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--mode", default="search", help="of 16 at once")
    parser.add_argument("--crowd-mode", default="chat")
    parser.add_argument("--questions", default="data/world/test.jsonl", help="JSON lines with `question`")
    parser.add_argument("--pid", type=int, help="of the server, to read its memory and time")
    flags = parser.parse_args()
    lines = Path(flags.questions).read_text(encoding="utf-8").splitlines()
    questions = [json.loads(line)["question"] for line in lines[:CROWD_QUESTIONS]]
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=flags.url, timeout=600, limits=limits) as client:
        first_questions = questions[:SIMULTANEOUS]
        await at_once(client=client, questions=first_questions, mode=flags.mode, pid=flags.pid)
        await crowd(client=client, questions=questions, mode=flags.crowd_mode, pid=flags.pid)


if __name__ == "__main__":
    asyncio.run(main())
