"""Plots of runs: training and validation loss against tokens."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def plot_log(log: Path, out: Path) -> None:
    """Draws `log.jsonl` of one run as a PNG or SVG."""
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    if not lines:
        return
    fig, ax = plt.subplots(figsize=(7, 4.2), dpi=120)
    tokens = [x["tokens"] / 1e6 for x in lines]
    smooth, value = [], None
    for x in lines:
        value = x["loss"] if value is None else 0.98 * value + 0.02 * x["loss"]
        smooth.append(value)
    ax.plot(tokens, smooth, color="#4477aa", lw=1.2, label="training (smoothed)")
    names = sorted({name for x in lines for name in x.get("valid", {})})
    for name, color in zip(names, ("#cc6677", "#228833", "#aa3377", "#ccbb44")):
        points = [(x["tokens"] / 1e6, x["valid"][name]["nats"]) for x in lines if name in x.get("valid", {})]
        ax.plot(*zip(*points), color=color, marker="o", ms=3, lw=1, label=f"validation: {name}")
    ax.set_xlabel("million tokens")
    ax.set_ylabel("loss (nats per token)")
    ax.set_ylim(top=min(max(smooth), smooth[-1] + 3))
    ax.grid(alpha=0.25)
    ax.legend(frameon=False)
    fig.tight_layout()
    fig.savefig(out)
    plt.close(fig)
