"""What a running server takes: people at once against one after another, and a crowd with bad manners.

    python -m r3lite.serve ... --requests-per-minute 1000000 &
    python -m bench.serving --mode search --questions data/world/test.jsonl

Prints whether 16 at once got what each gets alone and how much faster it was; then the statuses of 1,000 requests, of
which 5 % disconnect, 5 % are too large and 5 % malformed, the server's memory (with --pid, on Linux), its free places.
"""

import argparse
import asyncio
import json
import os
import random
import time
from collections import Counter
from pathlib import Path

import httpx2 as httpx  # google-genai brings it

PEOPLE, WARM, CROWD = 16, 300, 1000


def resident(pid: int | None) -> float:
    """MiB of a process that are in memory."""
    if pid is None:
        return float("nan")
    line = next(x for x in Path(f"/proc/{pid}/status").read_text().splitlines() if x.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def computed(pid: int | None) -> float:
    """Seconds that a process has computed: on a busy machine they say more than the clock."""
    if pid is None:
        return float("nan")
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def answer(client: httpx.AsyncClient, question: str, mode: str) -> str:
    reply = await client.post("/generate", json={"query": question, "mode": mode})
    reply.raise_for_status()
    return reply.json()["reasoning_trace"]


async def at_once(client: httpx.AsyncClient, questions: list[str], mode: str, pid: int | None) -> None:
    """The same questions one after another and together."""
    await asyncio.gather(*(answer(client, q, mode) for q in questions))  # caches are allocated
    times = [(time.perf_counter(), computed(pid))]
    alone = [await answer(client, q, mode) for q in questions]
    times.append((time.perf_counter(), computed(pid)))
    together = await asyncio.gather(*(answer(client, q, mode) for q in questions))
    times.append((time.perf_counter(), computed(pid)))
    print(f"{sum(a == b for a, b in zip(alone, together))} of {len(questions)} the same")
    for what, began, middle, end in zip(("by the clock", "of the server's processor"), *times):
        one, other = middle - began, end - middle
        print(f"seconds {what}: {one:.1f} alone, {other:.1f} together, {one / other:.1f} x")


async def one(client: httpx.AsyncClient, rng: random.Random, questions: list[str], mode: str) -> str:
    """A request of the crowd; its status."""
    question, lot = rng.choice(questions), rng.random()
    try:
        if lot < 0.05:
            async with client.stream(
                "POST", "/generate", json={"query": question, "mode": mode, "stream": True}
            ) as reply:
                async for _ in reply.aiter_lines():
                    return "gone"
        if lot < 0.10:
            return str((await client.post("/generate", json={"query": "x" * (1 << 20)})).status_code)
        if lot < 0.15:
            bad = rng.choice(["{", "[]", '{"query": 5}', '{"mode": "chat"}', '{"query": "\\ud800"}', "[" * 9999])
            return str(
                (await client.post("/generate", content=bad, headers={"content-type": "application/json"})).status_code
            )
        stream = rng.random() < 0.5
        return str(
            (await client.post("/generate", json={"query": question, "mode": mode, "stream": stream})).status_code
        )
    except httpx.HTTPError as error:
        return type(error).__name__


async def crowd(client: httpx.AsyncClient, questions: list[str], mode: str, pid: int | None) -> None:
    rng, gate = random.Random(0), asyncio.Semaphore(PEOPLE)

    async def gated() -> str:
        async with gate:
            return await one(client, rng, questions, mode)

    async def many(count: int) -> Counter:
        return Counter(await asyncio.gather(*(gated() for _ in range(count))))

    await many(WARM)
    before, began = resident(pid), time.perf_counter()
    statuses = await many(CROWD)
    seconds, after = time.perf_counter() - began, resident(pid)
    await asyncio.sleep(2)
    health = (await client.get("/api/health")).json()["requests"]
    print(
        f"{dict(statuses)} in {seconds:.0f} s; {health}; "
        f"memory {before:.1f} -> {after:.1f} MiB ({after / before - 1:+.2%})"
    )


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--mode", default="search", help="of 16 at once")
    parser.add_argument("--crowd-mode", default="chat")
    parser.add_argument("--questions", default="data/world/test.jsonl", help="JSON lines with `question`")
    parser.add_argument("--pid", type=int, help="of the server, to read its memory and time")
    given = parser.parse_args()
    lines = Path(given.questions).read_text(encoding="utf-8").splitlines()
    questions = [json.loads(line)["question"] for line in lines[:64]]
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=given.url, timeout=600, limits=limits) as client:
        await at_once(client, questions[:PEOPLE], given.mode, given.pid)
        await crowd(client, questions, given.crowd_mode, given.pid)


if __name__ == "__main__":
    asyncio.run(main())
