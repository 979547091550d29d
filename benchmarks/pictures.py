"""The README's charts from the newest results in benchmarks/results, as SVG: how fast, beside whom. Needs matplotlib
(`pip install --group bench`).

    python benchmarks/pictures.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
from report import MODELS, ROOT, newest, section

matplotlib.use("svg")
import matplotlib.pyplot as plt

PICTURES = ROOT / "docs" / "pictures"
OURS, THEIRS, OTHERS = "#2f6b5c", "#c9a26b", "#a9b3b8"
plt.rcParams.update({"font.family": "sans-serif", "font.size": 10, "axes.spines.top": False, "axes.spines.right": False,
                     "axes.grid": True, "axes.grid.axis": "y", "grid.color": "#e6e3dc", "axes.axisbelow": True,
                     "svg.fonttype": "none", "svg.hashsalt": "relaxpack", "figure.facecolor": "white"})


def save(figure: Any, name: str) -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(PICTURES / name, metadata={"Date": None, "Creator": None})
    plt.close(figure)


def cpu() -> None:
    """Tokens per second of prefill and decode, one bar a system."""
    found = newest("cpu_peers-*.json")
    if found is None:
        return
    median, env = found[1]["median"], found[1]["environment"]
    systems = [s for s in next(iter(median.values())) if not s.startswith("ratio")]
    figure, panels = plt.subplots(1, 2, figsize=(9, 3))
    for panel, kind in zip(panels, ("prefill", "decode"), strict=True):
        lengths = [key.split("_")[1] for key in median if key.startswith(kind)]
        for i, (system, color) in enumerate(zip(systems, (OURS, THEIRS, OTHERS), strict=False)):
            values = [median[f"{kind}_{length}"][system] for length in lengths]
            bars = panel.bar([x + (i - 1) * 0.27 for x in range(len(lengths))], values, 0.25, label=system, color=color)
            panel.bar_label(bars, fmt="{:.0f}", fontsize=8, padding=2)
        panel.set_xticks(range(len(lengths)), [f"{length} tokens" for length in lengths])
        panel.set_title({"prefill": "Reading the prompt", "decode": "Answering after it"}[kind], fontsize=11, loc="left")
        panel.set_ylabel("tokens per second")
        panel.margins(y=0.12)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="upper right", ncol=3, frameon=False, fontsize=9)
    figure.suptitle(f"SmolLM2-135M, the same Q4_1 GGUF, {env['threads']} threads", x=0.01, ha="left", fontsize=9,
                    color="#6b6860")
    save(figure, "cpu.svg")


def gpu() -> None:
    """Tokens per second over the batch: this engine, its step without graphs, its peers; one panel a model."""
    figure, panels = plt.subplots(1, len(MODELS), figsize=(9, 3.2))
    for panel, model in zip(panels, MODELS, strict=True):
        ours, peer = newest(f"gpu_{model}_bf16_*.json"), newest(f"gpu_vllm_{model}_*.jsonl")
        if ours is None or peer is None:
            return
        theirs = [(r["batch"], r["decode_tok_s"]) for r in peer[1] if r.get("bench") == "gpu_decode" and r["prompt"] == 512]
        mine = [(r["batch"], r["tokens_per_second"]) for r in ours[1]["engine"] if r["prompt"] == 512]
        launched = [(int(b), int(b) / ms * 1e3) for b, ms in ours[1].get("eager_decode_ms", {}).items()]
        second = section(f"transformers_{model}")
        eager = [(r["batch"], r["tokens_per_second"]) for r in second[1]["rows"]] if second else []
        for points, name, style in ((mine, "relaxpack", {"color": OURS, "linewidth": 2}),
                                    (launched, "its step without graphs", {"color": OURS, "linestyle": ":"}),
                                    (theirs, "vLLM 0.26", {"color": THEIRS, "linewidth": 2}),
                                    (eager, "transformers", {"color": OTHERS, "linewidth": 2})):
            if points:
                panel.plot(*zip(*sorted(points), strict=True), marker="o", markersize=4, label=name, **style)
        for batch, rate in mine:
            panel.annotate(f"{rate / dict(theirs)[batch]:.2f}x", (batch, rate), textcoords="offset points", xytext=(0, 7),
                           ha="center", fontsize=8)
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.margins(y=0.15)
        panel.set_xticks([b for b, _ in mine], [str(b) for b, _ in mine])
        panel.set_xlabel("sequences at once")
        panel.set_ylabel("tokens per second")
        panel.set_title(f"{model}, bfloat16, {ours[1]['gpu']}", fontsize=11, loc="left")
    panels[0].legend(frameon=False, fontsize=9)
    save(figure, "h200.svg")


def main() -> None:
    cpu()
    gpu()
    for path in sorted(Path(PICTURES).glob("*.svg")):
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
