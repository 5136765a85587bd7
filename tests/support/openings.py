"""Openings of pools up to their first prepared node: what each does, beside what its plan said before."""

from __future__ import annotations

import re
import runpy
import sys
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import gallery
import skyward as sky
from skyward.api.node_packages import MIRRORING, runs_here
from skyward.api.plan import Plan
from skyward.environment.skyward_wheel import engine_pins
from skyward.events import InstanceLaunching, Notice
from skyward.fleet.node import Node
from skyward.fleet.node_setup import NodeSetup
from skyward.providers.base import Instance, LaunchOrder, Offer, Provider
from skyward.providers.registry import provider_type
from skyward.providers.several import Several
from skyward.request.image import ImageSettings
from skyward.request.includes import included_files, pack_files
from support.clouds.vendors import VENDORS

__all__ = ["WITH_FRAMEWORKS", "Opening", "OpeningEndedError", "open_as_planned", "watch_openings"]

WITH_FRAMEWORKS = {name for name, test in gallery.ELSEWHERE.items() if test.startswith("ml/")}
"""Examples that need frameworks."""
_WATCHED = ("local", "aws", "ssh", *(vendor.name for vendor in VENDORS))


class OpeningEndedError(sky.SkywardError):
    """Ends an opening once its first node would be prepared."""


@dataclass
class Opening:
    """One opening of a pool.

    Attributes:
        plan: what was planned before it.
        provider: the pool's provider.
        orders: what that was asked for: number of nodes, and offers.
        tried: names of the providers of which machines were requested, in order.
        launches: what it published of that.
        notices: all other remarks that it published.
        remarks: those of them that it published before its first node would be prepared.
        image: the image that its nodes were to get; None if it got none.
        files: names of the files in the archive that they were to get.
        installs: whether they were to get anything installed.
    """

    plan: Plan
    provider: Provider
    orders: list[tuple[int, Sequence[Offer]]] = field(default_factory=list[tuple[int, Sequence[Offer]]])
    tried: list[str] = field(default_factory=list[str])
    launches: list[InstanceLaunching] = field(default_factory=list[InstanceLaunching])
    notices: list[str] = field(default_factory=list[str])
    remarks: tuple[str, ...] = ()
    image: ImageSettings | None = None
    files: tuple[str, ...] = ()
    installs: bool = True

    def check(self) -> None:
        """Assert that it did what was planned."""
        plan = self.plan
        assert plan.problems == ()
        later = re.compile(
            rf"{MIRRORING}|nodes: |\S+ refuses: |asked for |they can cost "
        )  # the first is told as packages
        remarks = {text for text in self.remarks if not later.match(text)}
        endless = {text for text in remarks if "cannot end their own bill" in text}  # a line of the plan, no note
        assert {*plan.notes} == remarks - endless
        assert not endless or not all(each.ends_itself for each in plan.offers)
        if not plan.nodes:  # its first node is bought for its first call
            return
        apart = plan.nodes if plan.spread else 1  # each machine is bought for itself
        assert [row for order in self.orders for row in _rows(*order)] == apart * [
            (each.nodes // apart, each.attempt, each.machine, each.region, each.zone, each.spot, each.price_per_hour)
            for each in plan.offers
        ]
        announced = [
            (apart * each.count, each.instance_type, each.at_most and apart * each.at_most) for each in self.launches
        ]
        first = [(each.nodes, each.machine, each.at_most) for each in plan.offers if each.attempt == 1]
        others = [(each.nodes, each.machine, each.at_most) for each in plan.offers if each.attempt > 1]
        assert announced[:1] == first[:1]
        assert {*first} <= {*announced} <= {*first, *others}  # of a list of providers, each attempt is announced
        assert self.image is not None, "it did not come to its first node"
        assert plan.packages == ((*self.image.pip, *engine_pins()) if self.installs else ())
        assert plan.files == self.files


def _rows(nodes: int, offers: Sequence[Offer]) -> Sequence[tuple[Any, ...]]:
    return [
        (nodes, attempt, offer.spec.name, offer.region, offer.zone, offer.spot, offer.price_per_hour)
        for attempt, offer in enumerate(offers, 1)
    ]


def _archived(image: ImageSettings) -> tuple[str, ...]:
    with tempfile.TemporaryFile() as file:
        pack_files(included_files(image.includes), file)
        file.seek(0)
        with tarfile.open(fileobj=file) as archive:
            return tuple(member.name for member in archive if not member.isdir())


def open_as_planned(example: str, arguments: Sequence[str], patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Run an example until its first pool, or several at once, would prepare a node; compare that with the plan."""
    patch.chdir(folder)
    patch.syspath_prepend((gallery.EXAMPLES / example).parent)
    patch.setattr(sys, "argv", [example, *arguments])
    openings = watch_openings(patch)
    with suppress(sky.SkywardError, ExceptionGroup):
        runpy.run_path(str(gallery.EXAMPLES / example), run_name="__main__")
    assert openings
    for opening in openings:
        opening.check()


def watch_openings(patch: pytest.MonkeyPatch) -> list[Opening]:
    """Plan every pool that this process opens, and end its opening where its first node would be prepared.

    It raises :class:`OpeningEndedError` then. Return the list to which openings are added; ``patch`` ends the watch.
    """
    openings: list[Opening] = []
    by_pool: dict[str, Opening] = {}
    enter: Callable[..., Any] = sky.ComputePool.__enter__
    make_running: Callable[..., Any] = vars(sky.ComputePool)["_make_running"]

    def planned_enter(pool: sky.ComputePool) -> Any:
        opening = Opening(pool.plan(), vars(pool)["_provider"])
        vars(pool)["opening"] = opening
        openings.append(opening)
        pool.on(InstanceLaunching, opening.launches.append)
        pool.on(Notice, lambda event: opening.notices.append(event.message))
        return enter(pool)

    def noted(pool: sky.ComputePool, base: Any, stack: Any) -> Any:
        by_pool[base.pool_id] = vars(pool)["opening"]
        return make_running(pool, base, stack)

    async def equip(setup: Any, _: Node) -> None:
        machines = setup._machines
        opening = by_pool[machines.pool_id]
        opening.remarks = opening.remarks or tuple(opening.notices)
        opening.image, opening.files = machines.request.image, _archived(machines.request.image)
        opening.installs = not (machines.provider.this_machine and runs_here(machines.request.image))
        raise OpeningEndedError("the test ends it here")

    patch.setattr(sky.ComputePool, "__enter__", planned_enter)
    patch.setattr(sky.ComputePool, "_make_running", noted)
    patch.setattr(NodeSetup, "equip", equip)
    for kind in (Several, *map(provider_type, _WATCHED)):
        _watch_orders(patch, kind, by_pool)
    return openings


def _watch_orders(patch: pytest.MonkeyPatch, kind: type[Provider], by_pool: dict[str, Opening]) -> None:
    launch = kind.launch

    async def watched(provider: Any, offers: Sequence[Offer], order: LaunchOrder) -> Sequence[Instance]:
        opening = by_pool[order.pool_id]
        if provider is opening.provider:
            opening.orders.append((len(order.keys), offers))
        if not isinstance(provider, Several):
            opening.tried.append(provider.name)
        return await launch(provider, offers, order)

    patch.setattr(kind, "launch", watched)
