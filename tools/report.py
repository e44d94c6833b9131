"""What tools.compare shows: tables for the terminal, a page of its own (HTML), a picture where matplotlib is, a run on Weights & Biases."""

from __future__ import annotations

import math
from base64 import b64encode
from collections.abc import Callable
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

from config import TrainConfig
from engine.dashboard import FINISH, INIT, short
from engine.log import count, duration, say

Row = dict[str, Any]
Table = list[list[str]]     # a heading and rows of cells


def figure(value: float | None, form: str, nothing: str = "-") -> str:
    return nothing if value is None else form.format(value)


def size(n: float | None) -> str:
    return "-" if n is None else next(f"{n / s:,.3g} {u}" for u, s in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1)) if n >= s or s == 1)


def inner(field: str, key: str, form: Callable[[Any], str], r: Row) -> str:
    return form(r[field].get(key))


def tables(result: Row) -> dict[str, Table]:
    """What is shown in the terminal and in the page; the lowest loss first."""
    rows = sorted(result["rows"], key=lambda r: math.inf if r["loss"] is None else r["loss"])
    contexts = [str(T) for T in result["contexts"]]
    rates = sorted({lr for r in rows for lr in r["sweep"]}, key=float)
    columns: dict[str, dict[str, Callable[[Row], str]]] = {
        "quality": {
            "parameters": lambda r: f"{r['parameters']:,}",
            "n_embd": lambda r: str(r["n_embd"]),
            "n_inner": lambda r: str(r["n_inner"]),
            "learning rate": lambda r: figure(r["learning_rate"], "{:g}") + "*" * r["edge"],
            "loss": lambda r: figure(r["loss"], "{:.4f}") + figure(r["loss_spread"], " ± {:.4f}", ""),
            "bits per byte": lambda r: figure(r["bits_per_byte"], "{:.4f}"),
            "tokens": lambda r: "-" if r["tokens"] is None else count(r["tokens"]).strip(),
            "time": lambda r: "-" if r["seconds"] is None else duration(r["seconds"]),
            **{("recall (MQAR)" if name == "mqar" else name): partial(inner, "probes", name, lambda v: figure(v, "{:.1%}"))
               for name in dict.fromkeys(name for r in rows for name in r["probes"])}},
        "cost": {
            "training tokens/s": lambda r: figure(r["tokens_per_s"], "{:,.0f}"),
            "peak GB": lambda r: figure(r["memory_gb"], "{:.2f}"),
            **{f"decode tokens/s at {int(T):,}": partial(inner, "decode_tokens_per_s", T, lambda v: figure(v, "{:,.0f}"))
               for T in contexts},
            **{f"state at {int(T):,}": partial(inner, "state_bytes", T, size) for T in contexts}},
        "loss at each learning rate (first seed)": {
            lr: partial(inner, "sweep", lr, lambda v: figure(v, "{:.4f}")) for lr in rates}}
    return {title: [["layers", *cells], *[[r["layers"], *[cell(r) for cell in cells.values()]] for r in rows]]
            for title, cells in columns.items()}


def notes(result: Row) -> list[str]:
    """What the figures mean, and what is to be doubted."""
    spread = "± is the standard deviation over seeds" if result["seeds"] > 1 else "one seed: differences may be chance (--seeds)"
    edge = [r["layers"] for r in result["rows"] if r["edge"]]
    asked = 60 * (result["settings"]["minutes"] or 0)
    other = [r["layers"] for r in result["rows"] if asked and r["seconds"] and abs(r["seconds"] / asked - 1) > 0.1]
    return [
        f"equal {result['equal']} of {result['dataset']}, the same in the same order; {spread}",
        f"{result['device']}, torch {result['torch']}",
        "parameters: all, embedding and head too; loss in nats a token, as bits per byte, over the whole validation split",
        "peak: of tensors on a GPU, else of the whole process; decoding and state: one row, float32, eager",
        *(["* the lowest or highest learning rate of those tried was best, another may be better: " + ", ".join(edge)] if edge else []),
        *([f"not as fast as measured before, the time is off by more than 10 %: {', '.join(other)}"] if other else []),
        *[f"{r['layers']}: {why}" for r in result["rows"] for why in r["failed"]]]


def plain(table: Table) -> str:
    wide = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    return "\n".join("  ".join(f"{cell:<{w}}" if i == 0 else f"{cell:>{w}}" for i, (cell, w) in enumerate(zip(row, wide))) for row in table)


def report(result: Row) -> str:
    return "\n\n".join([*[f"{title}\n{plain(table)}" for title, table in tables(result).items()], "\n".join(notes(result))])


def draw(result: Row, path: Path) -> Path | None:
    """Validation loss against tokens and against seconds, a line a run at the best learning rate. None without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return None
    fig = Figure(figsize=(13, 5), layout="constrained")
    for ax, (i, label) in zip(fig.subplots(1, 2, sharey=True), enumerate(("tokens", "seconds of training"))):
        for k, row in enumerate(result["rows"]):
            for n, curve in enumerate(row["curves"]):
                ax.plot([p[i] for p in curve], [p[2] for p in curve], color=f"C{k % 10}", linestyle="-" if k < 10 else "--", marker=".",
                        label=row["layers"] if n == 0 else None)
        ax.set(xlabel=label, ylabel="validation loss, nats a token" if i == 0 else "")
        ax.grid(True, alpha=0.3)
        if ax.lines:
            ax.legend(fontsize=8)
    fig.savefig(path, dpi=120)
    return path


STYLE = """body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:1200px;padding:0 1rem}
table{border-collapse:collapse;margin:.5rem 0 1.5rem;font-variant-numeric:tabular-nums}
th,td{padding:.3rem .7rem;text-align:right;border-bottom:1px solid #ddd}
th:first-child,td:first-child{text-align:left;font-family:ui-monospace,monospace}th{border-bottom:2px solid #888}img{max-width:100%}
div{overflow-x:auto}p{margin:.2rem 0;color:#555}pre{white-space:pre-wrap;color:#555}"""


def page(result: Row, picture: Path | None) -> str:
    """One HTML file that needs nothing else."""
    cells = lambda tag, row: "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row) + "</tr>"
    body = []
    for title, table in tables(result).items():
        body.append(f"<h2>{escape(title)}</h2><div><table><thead>{cells('th', table[0])}</thead><tbody>"
                    + "".join(cells("td", row) for row in table[1:]) + "</tbody></table></div>")
    if picture:
        png = b64encode(picture.read_bytes()).decode()
        body.append(f'<h2>loss against tokens and time</h2><img alt="validation loss" src="data:image/png;base64,{png}">')
    body.append("<h2>notes</h2>" + "".join(f"<p>{escape(line)}</p>" for line in notes(result)))
    settings = " ".join(f"{k}={v!r}" for k, v in result["settings"].items())
    body.append(f"<details><summary>settings</summary><pre>{escape(settings)}</pre></details>")
    return (f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Comparison</title><style>{STYLE}</style>'
            f"<h1>{len(result['rows'])} ways of mixing tokens</h1>{''.join(body)}</html>\n")


def show(config: TrainConfig, result: Row, out: Path) -> None:
    """The tables and the picture as a run of their own on Weights & Biases; what goes wrong is one line."""
    try:
        import wandb
        settings = wandb.Settings(silent=True, console="off", init_timeout=INIT, finish_timeout=FINISH, finish_timeout_raises=True)
        mode: Any = wandb.setup(settings).settings.mode if config.wandb_mode == "auto" else config.wandb_mode
        if mode == "online" and not wandb.login(prompt=False, verify=False):
            mode = "offline"
        name = config.wandb_run_name or out.resolve().name
        with wandb.init(project=config.wandb_project, name=name, mode=mode, settings=settings, config=result["settings"],
                        reinit="create_new") as board:
            for title, table in tables(result).items():
                board.log({title.partition(" (")[0]: wandb.Table(columns=[*table[0]], data=table[1:])})
            if (out / "compare.png").exists():
                board.log({"curves": wandb.Image(str(out / "compare.png"))})
            board.log({"page": wandb.Html((out / "compare.html").read_text(encoding="utf-8"))})
        say(f"wandb: {board.url if mode == 'online' else 'offline; to upload it: wandb sync ' + str(Path(board.dir).parent)}")
    except ImportError:
        say("wandb is not installed, so there is no dashboard: pip install wandb")
    except Exception as e:
        say(f"warning: the comparison is not on wandb ({short(e)}); {out / 'compare.html'} has all of it")
