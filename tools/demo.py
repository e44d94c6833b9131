"""What `make demo` ends with: samples, the validation loss, and how much of what was written are words of the corpus."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass

from config.check import check_fields, check_range
from engine.cli import one_line_errors, parse


@dataclass
class DemoConfig:
    """Samples of a trained model, its validation loss, and the share of sampled words that occur in its corpus."""

    checkpoint: str = "out/demo"
    """a run's folder (its best step is taken), or one of its steps"""
    samples: int = 16
    """texts from which words are counted"""
    shown: int = 2
    """of them are printed"""
    max_new_tokens: int = 250
    """of each text"""
    temperature: float = 0.7
    """of the samples"""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, mps"""

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("samples", "max_new_tokens", "temperature"):
            check_range(self, name, above=0)


def words(text: str) -> list[str]:
    """Runs of letters, with apostrophes within; upper and lower case are one."""
    return re.findall(r"[^\W\d_]+(?:'[^\W\d_]+)*", text.lower())


def known_share(texts: list[str], corpus: set[str]) -> float:
    """The share of the words of `texts` that are in `corpus`; a text's last word may be cut off and is left out."""
    written = [w for text in texts for w in words(text.rsplit(None, 1)[0] if text.split() else "")]
    return sum(w in corpus for w in written) / max(1, len(written))


def main(config: DemoConfig) -> dict[str, float]:
    from data.find import find
    from engine.checkpoint import find_step, load_model, read_config
    from engine.generate import Text, generate
    from eval import EvalConfig, evaluate

    step = find_step(config.checkpoint)
    result = evaluate(EvalConfig(checkpoint=str(step), device=config.device))
    model, tokenizer = load_model(step)
    texts, streams = [""] * config.samples, [Text(tokenizer) for _ in range(config.samples)]
    for ids in generate(model, [tokenizer.encode("\n")] * config.samples, config.max_new_tokens, temperature=config.temperature,
                        ends=lambda row: streams[row].done, vocab_size=tokenizer.vocab_size):
        for row, i in ids.items():
            texts[row] += streams[row].push(i)
    for text in texts[:config.shown]:
        print(f"{text.strip()}\n{'-' * 15}")

    corpus: set[str] = set()
    prepared = find(read_config(step)["dataset"])
    for name in ("train", "val"):
        split, size = prepared.split(name), 1 << 20
        for start in range(0, len(split), size):       # 64 tokens over, for a word that the cut falls into
            corpus.update(words(tokenizer.decode(split.read(start, min(size + 64, len(split) - start)))))
    share = known_share(texts, corpus)
    bits = "" if result["bits_per_byte"] is None else f" ({result['bits_per_byte']:.3f} bits per byte)"
    print(f"validation loss {result['loss']:.4f} nats a {result['unit']}{bits}")
    print(f"{share:.1%} of the {sum(len(words(t)) for t in texts)} sampled words occur in the corpus")
    return {"val_loss": result["loss"], "known_words": share}


if __name__ == "__main__":
    config = parse(DemoConfig)
    with one_line_errors():
        main(config)
    sys.stdout.flush()
