"""Pictures of sparse attention's patterns, drawn by the functions that attention itself runs: text, or a PNG with --png."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from textwrap import fill

from config.check import check_fields, check_range
from engine.cli import one_line_errors, parse

SHOWN = ["local(6)", "first(2) | local(4)", "local(4) | strided(4)", "fixed(4)", "chunk(8)", "local(8) & strided(2)",
         "first(2) | local_blocks(2, 2) | random_blocks(1, 2)", "local(4) / strided(4)"]


@dataclass
class PatternsConfig:
    """Draws who sees whom: a line a query, a column a key."""

    pattern: str = ""
    """as in sparse(pattern="..."), for example "first(2) | local(4)" (nothing: one of each kind)"""
    T: int = 24
    """tokens"""
    heads: int = 0
    """heads shown side by side (0: as many as differ, or 2 where chance draws)"""
    png: str = ""
    """write a picture to this file (needs matplotlib)"""

    def __post_init__(self) -> None:
        check_fields(self)
        check_range(self, "T", above=0)
        check_range(self, "heads", least=0)


def main(config: PatternsConfig) -> None:
    from mixers.sparse import parse as read
    from ops.patterns import Alternate, Pattern, picture, table

    def heads(pattern: Pattern, text: str) -> int:
        return config.heads or (len(pattern.kinds) if isinstance(pattern, Alternate) else 1 + ("random" in text))

    patterns = {text: read(text) for text in ([config.pattern] if config.pattern else SHOWN)}
    if config.png:
        tables = [(text, h, table(p, config.T, h)) for text, p in patterns.items() for h in range(heads(p, text))]
        draw(tables, config.png)
        print(f"wrote {config.png}")
        return
    print("\n\n".join(f"{text}\n{picture(p, config.T, heads(p, text))}" for text, p in patterns.items()))


def draw(tables: list, path: str) -> None:
    """tables: (title, head, (T, T) bool)."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ModuleNotFoundError("--png needs matplotlib: pip install matplotlib; without --png the pictures are text") from None
    columns = min(4, len(tables))
    rows = -(-len(tables) // columns)
    figure = Figure(figsize=(3 * columns, 3.3 * rows), layout="constrained")
    for ax, (title, head, seen) in zip(figure.subplots(rows, columns, squeeze=False).flat, tables):
        ax.imshow(seen, cmap="Blues", vmin=0, vmax=1.4)
        several = sum(t[0] == title for t in tables) > 1
        ax.set_title(fill(title, 36) + (f"\nhead {head}" if several else ""), fontsize=8)
        ax.set_xlabel("key", fontsize=7)
        ax.set_ylabel("query", fontsize=7)
        ax.tick_params(labelsize=6)
    for ax in figure.axes[len(tables):]:
        ax.remove()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    config = parse(PatternsConfig)
    with one_line_errors():
        main(config)
    sys.stdout.flush()
