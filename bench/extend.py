"""A model taken to longer contexts in the ways of tools.extend, without and with a short fine-tune, measured alike: bits per byte by
context length and by position, passkey and needle. `python -m bench.extend --checkpoint out/python256`"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from config.check import check_fields, check_range, nearest
from engine.cli import Repeated, one_line_errors, parse

ALL = ("none", "linear", "ntk", "dynamic", "yarn", "longrope", "llama3")
METHODS = ("none", "linear", "ntk", "yarn", "longrope")


@dataclass
class ExtendBench:
    """One table and one picture for a checkpoint. What is done is kept in `out`, and the same command goes on with it."""

    checkpoint: str | None = None
    """a run's folder, one of its steps, or a folder of runs (None: the newest run under out/)"""
    methods: Repeated[str] = ()
    """which, of none, linear, ntk, dynamic, yarn, longrope (searched), llama3 (none given: all but dynamic and llama3)"""
    factor: float = 4.0
    """times the context that it was trained on"""
    finetune_share: float = 0.01
    """of the tokens that it was trained on, for fine-tuning"""
    lengths: Repeated[int] = ()
    """contexts to measure (none: the trained one and its doubles, up to 16 times)"""
    limit: int = 8
    """documents of the longest of them, evenly over the validation split"""
    trials: int = 2
    """passkeys and needles for each depth and length (0: none)"""
    population: int = 24
    """of LongRoPE's search"""
    iterations: int = 10
    """generations of it"""
    out: str = "out/bench/extend"
    """folder of extend.json, extend.png and the checkpoints"""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, mps"""

    def __post_init__(self) -> None:
        check_fields(self)
        check_range(self, "factor", above=1)
        check_range(self, "finetune_share", above=0, most=1)
        check_range(self, "limit", above=0)
        check_range(self, "trials", least=0)
        for method in self.methods:
            if method not in ALL:
                raise ValueError(f"methods: unknown {method!r}{nearest(method, ALL)}")


if __name__ == "__main__":
    config = parse(ExtendBench)       # before torch is imported, so that --help and mistakes answer at once

from config import TrainConfig, from_dict
from data.mixture import Mixture
from engine.checkpoint import find_step, load_model, read_config, read_progress, times
from engine.context import draw, measure
from engine.device import keep_memory, pick_device, pick_dtype
from tools import extend


def extended(config: ExtendBench, method: str, tokens: int, step: Path) -> Path:
    """The step folder of the checkpoint for longer contexts; made once."""
    out, searched = Path(config.out, named(config, method, tokens)), method == "longrope"
    how = extend.ExtendConfig(checkpoint=str(step), method="linear" if method == "none" else method, factor=config.factor,  # type: ignore[arg-type]
                              finetune_tokens=tokens, search=searched, out_dir=str(out), device=config.device)
    if searched:
        how = replace(how, population=config.population, iterations=config.iterations)
    if (out / "latest").is_file() and extend.recorded(out) == extend.record(how, step):
        return find_step(out)
    if method == "none":               # longer rows alone
        run = from_dict(TrainConfig, read_config(step))
        wide = replace(run, block_size=times(run.block_size, config.factor))
        extend.begin(out, how, step)
        return extend.write(extend.tuned(how, run, wide, step, out), out, wide)
    return extend.main(how)


def named(config: ExtendBench, method: str, tokens: int) -> str:
    return f"{method}{config.factor:g}{'_tuned' if tokens else ''}"


def main(config: ExtendBench) -> dict[str, Any]:
    keep_memory()
    device, step = pick_device(config.device), find_step(config.checkpoint)
    run, trained = read_config(step), read_progress(step).tokens
    lengths = sorted(config.lengths) or [run["block_size"] << i for i in range(5)]
    corpus, *_ = Mixture(run["dataset"]).corpora.values()
    split, out = corpus.split("val"), Path(config.out)
    result: dict[str, Any] = {"settings": asdict(config), "trained": run["block_size"], "tokens": trained, "models": {}}
    for tokens in (0, max(1, round(config.finetune_share * trained))):
        for method in config.methods or METHODS:
            place = step if method == "none" and not tokens else extended(config, method, tokens, step)
            model, tokenizer = load_model(place, device)
            memo = out / f"{named(config, method, tokens)}.json"
            asked = {"lengths": lengths, "limit": config.limit, "trials": config.trials, "step": str(place),
                     "saved": (place / "model.safetensors").stat().st_mtime}
            found = json.loads(memo.read_text(encoding="utf-8")) if memo.is_file() else {}
            if found.get("asked") != asked:
                dtype = pick_dtype("float32", device, model.cfg.n_embd)
                found = measure(model, tokenizer, split, lengths, config.trials, config.limit, dtype=dtype, sliding=False)
                found["asked"] = asked
                memo.parent.mkdir(parents=True, exist_ok=True)
                memo.write_text(json.dumps(found) + "\n", encoding="utf-8")
            result["models"][f"{method}{', tuned' if tokens else ''}"] = found
            print(line(method, tokens, found), flush=True)
    (out / "extend.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    picture = draw(result["models"], out / "extend.png")
    print(f"\n{report(result)}\n{out / 'extend.json'}, {picture or 'no picture: pip install matplotlib'}")
    return result


def line(method: str, tokens: int, r: dict[str, Any]) -> str:
    losses = ", ".join(f"{row['length']:,} {row['strided']:.4f}" for row in r["lengths"])
    return f"{method}{f' after {tokens:,} tokens' if tokens else ''}: {losses} {r['unit']}"


def report(result: dict[str, Any]) -> str:
    """Losses of contexts one after another, with the difference to the unchanged model at its own length; then what is found."""
    models = result["models"]
    lengths = [row["length"] for row in next(iter(models.values()))["lengths"]]
    base = next((row["strided"] for row in models.get("none", {}).get("lengths", []) if row["length"] == result["trained"]), None)
    lines = [f"trained at {result['trained']:,} on {result['tokens']:,} tokens, extended {result['settings']['factor']:g} times; "
             f"{next(iter(models.values()))['unit']}", f"{'':18}" + "".join(f"{n:>18,}" for n in lengths)]
    for name, r in models.items():
        cells = [f"{row['strided']:.4f}" + (f" ({row['strided'] / base - 1:+6.1%})" if base else "") for row in r["lengths"]]
        lines.append(f"{name:18}" + "".join(f"{c:>18}" for c in cells))
    for kind in dict.fromkeys(c["kind"] for r in models.values() for c in r["retrieval"]):
        lines += ["", f"{kind + ': found':18}" + "".join(f"{n:>18,}" for n in lengths)]
        for name, r in models.items():
            shares = [[c["accuracy"] for c in r["retrieval"] if (c["kind"], c["length"]) == (kind, n)] for n in lengths]
            lines.append(f"{name:18}" + "".join(f"{sum(share) / len(share):>18.0%}" for share in shares))
    return "\n".join(lines)


if __name__ == "__main__":
    with one_line_errors():
        main(config)
