"""Pictures of the grid-world and of the supply-chain, as RGB arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from bmc_torchrl.envs.grid_world import SubgoalGrid
from bmc_torchrl.envs.supply_chain import SupplyNetwork

__all__ = ["draw_grid", "draw_supply_chain"]

_PAPER, _INK, _RULE = "#ffffff", "#22303c", "#cfd6dc"
_AGENT, _NEXT, _LATER, _DONE = "#1f6fb5", "#2f9e44", "#e8793a", "#b4bcc4"
_START, _NEXT_CELL, _LATER_CELL = "#eef4fa", "#e6f6ea", "#fdeee4"
_BRICK, _ROAD, _LOST = "#8c4a3c", "#e9ecef", "#c92a2a"
_SMOOTH = 3

RGB = np.ndarray[Any, np.dtype[np.uint8]]


class _Canvas:
    """Drawing in picture units on an image three times as large, then shrunk to be smooth."""

    def __init__(self, width: int, height: int) -> None:
        self.size = (width, height)
        self.image = Image.new("RGB", (width * _SMOOTH, height * _SMOOTH), _PAPER)
        self.pen = ImageDraw.Draw(self.image)

    def _scaled(self, points: Sequence[float]) -> list[float]:
        return [value * _SMOOTH for value in points]

    def box(
        self, *corners: float, fill: str, outline: str | None = None, radius: float = 0
    ) -> None:
        self.pen.rounded_rectangle(
            self._scaled(corners), radius * _SMOOTH, fill, outline, width=_SMOOTH
        )

    def disc(self, x: float, y: float, radius: float, fill: str) -> None:
        self.pen.ellipse(self._scaled((x - radius, y - radius, x + radius, y + radius)), fill)

    def line(self, *points: float, fill: str, width: float) -> None:
        self.pen.line(self._scaled(points), fill, round(width * _SMOOTH))

    def polygon(self, *points: float, fill: str) -> None:
        self.pen.polygon(self._scaled(points), fill)

    def text(
        self, x: float, y: float, words: str, size: float, *, fill: str = _INK, anchor: str = "mm"
    ) -> None:
        font = ImageFont.load_default(size * _SMOOTH)
        self.pen.text((x * _SMOOTH, y * _SMOOTH), words, fill, font, anchor=anchor)

    def pixels(self) -> RGB:
        return np.asarray(self.image.resize(self.size, Image.Resampling.BOX), dtype=np.uint8).copy()


def draw_grid(
    grid: SubgoalGrid, row: int, column: int, stage: int, steps: int = 0, *, cell: int = 72
) -> RGB:
    """The grid with its flags and the agent: green is the next flag, orange not yet open.

    Args:
        grid: The layout.
        row: The agent's row.
        column: The agent's column.
        stage: Number of sub-goals reached.
        steps: Number printed below the grid.
        cell: Pixels per cell.

    Returns:
        Picture, uint8 ``[height, width, 3]``.

    >>> draw_grid(SubgoalGrid(), 4, 0, 0).shape
    (408, 376, 3)
    """
    margin, footer = 8, 32
    canvas = _Canvas(grid.columns * cell + 2 * margin, grid.rows * cell + 2 * margin + footer)
    numbers = {goal: number for number, goal in enumerate(grid.goals, start=1)}
    for r in range(grid.rows):
        for c in range(grid.columns):
            number = numbers.get((r, c), 0)
            x, y = margin + c * cell, margin + r * cell
            fill = _cell_colour(number, stage, (r, c) == grid.start)
            canvas.box(x, y, x + cell, y + cell, fill=fill, outline=_RULE)
            if number:
                _draw_flag(canvas, x, y, cell, number, _flag_colour(number, stage))
    _draw_agent(canvas, margin + column * cell, margin + row * cell, cell)
    bottom = margin + grid.rows * cell + footer * 0.65
    canvas.text(
        margin,
        bottom,
        f"flag {min(stage + 1, len(grid.goals))} of {len(grid.goals)}"
        if stage < len(grid.goals)
        else "all flags reached",
        15,
        anchor="lm",
    )
    canvas.text(canvas.size[0] - margin, bottom, f"step {steps}", 15, anchor="rm")
    return canvas.pixels()


def _cell_colour(number: int, stage: int, start: bool) -> str:
    if number > stage + 1:
        return _LATER_CELL
    if number == stage + 1:
        return _NEXT_CELL
    return _START if start else _PAPER


def _flag_colour(number: int, stage: int) -> str:
    return _DONE if number <= stage else _NEXT if number == stage + 1 else _LATER


def _draw_agent(canvas: _Canvas, x: float, y: float, cell: float) -> None:
    canvas.disc(x + 0.5 * cell, y + 0.66 * cell, 0.22 * cell, _PAPER)
    canvas.disc(x + 0.5 * cell, y + 0.66 * cell, 0.19 * cell, _AGENT)


def _draw_flag(canvas: _Canvas, x: float, y: float, cell: float, number: int, colour: str) -> None:
    left, top = x + 0.3 * cell, y + 0.1 * cell
    canvas.line(left, top, left, y + 0.88 * cell, fill=_INK, width=0.035 * cell)
    canvas.polygon(
        left, top, left + 0.48 * cell, top + 0.17 * cell, left, top + 0.34 * cell, fill=colour
    )
    canvas.text(left + 0.14 * cell, top + 0.17 * cell, str(number), 0.2 * cell, fill=_PAPER)


def draw_supply_chain(
    network: SupplyNetwork,
    stocks: Sequence[int],
    *,
    produced: int = 0,
    shipped: Sequence[int] | None = None,
    demand: Sequence[int] | None = None,
    sold: Sequence[int] | None = None,
    steps: int = 0,
) -> RGB:
    """The factory, the warehouses with their stocks, and the trucks of the last step between them.

    Args:
        network: The constants.
        stocks: Stock of each location, ``1 + K`` numbers.
        produced: Items the last step produced.
        shipped: Items the last step sent to each warehouse.
        demand: Last demand at each warehouse.
        sold: Items sold by each warehouse.
        steps: Number printed in the corner.

    Returns:
        Picture, uint8 ``[height, width, 3]``.

    >>> draw_supply_chain(SupplyNetwork(), (10, 0)).shape
    (210, 640, 3)
    """
    nothing = [0] * network.warehouses
    lane = 170
    canvas = _Canvas(640, lane * network.warehouses + 40)
    middle = lane * network.warehouses / 2
    for j in range(network.warehouses):
        y = lane * (j + 0.5)
        _draw_road(canvas, middle + 20, y + 20, (shipped or nothing)[j], network.zeta[j])
        _draw_store(canvas, 440, y, stocks[j + 1], network.capacity[j + 1], f"warehouse {j + 1}")
        wanted, served = (demand or nothing)[j], (sold or nothing)[j]
        canvas.text(548, y - 18, f"demand {wanted}", 14, anchor="lm")
        canvas.text(548, y + 2, f"sold {served}", 14, anchor="lm", fill=_NEXT)
        if wanted > served:
            canvas.text(548, y + 22, f"lost {wanted - served}", 14, anchor="lm", fill=_LOST)
    _draw_store(canvas, 36, middle, stocks[0], network.capacity[0], "factory")
    for x in (48, 68):
        canvas.box(x, middle - 68, x + 10, middle - 44, fill=_BRICK)
    canvas.text(
        110, middle - 54, f"+{produced}", 15, fill=_AGENT if produced else _DONE, anchor="lm"
    )
    canvas.text(630, canvas.size[1] - 12, f"step {steps}", 14, anchor="rm")
    return canvas.pixels()


def _draw_store(canvas: _Canvas, x: float, y: float, stock: int, limit: int, name: str) -> None:
    width, top, bottom = 96.0, y - 44, y + 44
    canvas.box(x, top, x + width, bottom, fill=_START, outline=_INK, radius=4)
    level = bottom - 2 - (bottom - top - 4) * stock / max(limit, 1)
    if stock:
        canvas.box(x + 2, level, x + width - 2, bottom - 2, fill="#7fb2dd", radius=2)
    canvas.text(x + width / 2, y, str(stock), 24)
    canvas.text(x + width / 2, bottom + 14, f"{name} (of {limit})", 13)


def _draw_road(canvas: _Canvas, start: float, end: float, shipped: int, load: int) -> None:
    canvas.line(134, start, 438, end, fill=_ROAD, width=30)
    trucks = -(-shipped // load)
    shown = min(trucks, 5)
    for i in range(shown):
        share = (i + 1) / (shown + 1)
        x, y = 134 + share * 304, start + share * (end - start)
        _draw_truck(canvas, x, y, min(load, shipped - i * load))
    if trucks > shown:
        canvas.text(286, (start + end) / 2 + 26, f"{trucks} trucks", 13)


def _draw_truck(canvas: _Canvas, x: float, y: float, items: int) -> None:
    canvas.box(x - 24, y - 22, x + 10, y + 2, fill=_LATER, radius=2)
    canvas.box(x + 11, y - 14, x + 24, y + 2, fill=_INK, radius=3)
    canvas.box(x + 15, y - 11, x + 22, y - 5, fill=_START, radius=1)
    for wheel in (-15, 16):
        canvas.disc(x + wheel, y + 3, 5, _INK)
        canvas.disc(x + wheel, y + 3, 2, _RULE)
    canvas.text(x - 7, y - 10, str(items), 15, fill=_PAPER)
