"""Calls in asyncio: a pool opened with `async with`, futures that are awaited, and one that is given up.

usage: python examples/operators/async_await.py

On a cloud: replace `sky.Local()` with `sky.AWS()`, for example. The event loop is never blocked, not even while
machines are launched, so a web server can hold a pool.
"""

from __future__ import annotations

import asyncio
import threading

import skyward as sky


@sky.compute
def summarize(document: str) -> str:
    """Return the first words of a document."""
    return " ".join(document.split()[:3])


@sky.compute
def wait_forever() -> None:
    """Never return."""
    threading.Event().wait()


async def handle(pool: sky.ComputePool, number: int) -> str:
    """Answer one request, as a web server would."""
    summary = await pool.submit(summarize, f"document {number} has a long text, and more of it")
    return f"request {number}: {summary}"


async def main() -> None:
    """Handle requests at the same time, take results as they come, and give up on a call that takes too long."""
    async with sky.ComputePool(provider=sky.Local(), nodes=2) as pool:
        for answer in await asyncio.gather(*[handle(pool, number) for number in range(3)]):
            print(answer)

        futures = [asyncio.wrap_future(pool.submit(pow, base, 2)) for base in range(5)]
        print("as they come:", sorted([await done for done in asyncio.as_completed(futures)]))

        endless = pool.submit(wait_forever)
        try:
            async with asyncio.timeout(0.5):
                await endless
        except TimeoutError:
            pool.cancel_calls([endless])  # it runs: its worker ends with it, and is replaced
            print("given up; the pool goes on:", await pool.submit(sum, [1, 2, 3]))


if __name__ == "__main__":
    asyncio.run(main())
