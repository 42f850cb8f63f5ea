"""Weights for a test's engine, as a hand-over brings them."""

from __future__ import annotations


async def put_in_place(policy, directory, version, run):
    """Exchange an engine's weights: pause, load, resume."""
    await policy.pause()
    await policy.load(directory, version, run)
    await policy.resume()
